# SPDX-License-Identifier: Apache-2.0
#
# The commit id is read from every form a work tree can have, without a git program.
cmake_minimum_required(VERSION 3.25)

include("${SOURCE_DIR}/cmake/DiffulexGitCommit.cmake")

set(first 1111111111111111111111111111111111111111)
set(second 2222222222222222222222222222222222222222)

function(expect_commit directory expected)
  diffulex_git_commit(commit "${WORK_DIR}/${directory}")
  if(NOT commit STREQUAL expected)
    message(SEND_ERROR "${directory}: expected ${expected}, got ${commit}")
  endif()
endfunction()

file(REMOVE_RECURSE "${WORK_DIR}")
file(MAKE_DIRECTORY "${WORK_DIR}/plain")
expect_commit(plain unknown)

file(WRITE "${WORK_DIR}/branch/.git/HEAD" "ref: refs/heads/main\n")
expect_commit(branch unknown)  # no commit yet
file(WRITE "${WORK_DIR}/branch/.git/refs/heads/main" "${first}\n")
expect_commit(branch ${first})

file(WRITE "${WORK_DIR}/packed/.git/HEAD" "ref: refs/heads/main\n")
file(WRITE "${WORK_DIR}/packed/.git/packed-refs"
  "# pack-refs with: peeled\n${first} refs/heads/main-2\n${second} refs/heads/main\n^${first}\n")
expect_commit(packed ${second})

file(WRITE "${WORK_DIR}/detached/.git/HEAD" "${second}\n")
expect_commit(detached ${second})

file(WRITE "${WORK_DIR}/branch/.git/worktrees/linked/HEAD" "ref: refs/heads/topic\n")
file(WRITE "${WORK_DIR}/branch/.git/worktrees/linked/commondir" "../..\n")
file(WRITE "${WORK_DIR}/branch/.git/refs/heads/topic" "${second}\n")
file(WRITE "${WORK_DIR}/linked/.git" "gitdir: ../branch/.git/worktrees/linked\n")
expect_commit(linked ${second})
