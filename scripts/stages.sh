# SPDX-License-Identifier: Apache-2.0
#
# Stages of .ci/run: their names in the log, their seconds against a budget, and the one that failed.
# Source it after scripts/lib.sh.

stage_name=""
stage_start=0
stage_budget=0
stage_rows=()

# stage <name> <budget in seconds>: ends the stage before. Budgets are about twice what two idle cores
# take, so that only growth breaks them; stage_table fails if a stage took longer than its own. Its table
# is printed again with the last stage by tests/python/fixtures/stage_table.py.
stage() {
  finish_stage
  stage_name="$1"
  stage_budget="$2"
  stage_start="$SECONDS"
  printf '\n==== %s\n' "$stage_name"
}
finish_stage() {
  [ -n "$stage_name" ] || return 0
  stage_rows+=("$((SECONDS - stage_start))|$stage_budget|$stage_name")
  stage_name=""
}
stage_table() {
  local row seconds budget name over=() lines=()
  finish_stage
  lines+=("$(printf '%8s %8s  %s' seconds budget stage)")
  for row in "${stage_rows[@]}"; do
    IFS='|' read -r seconds budget name <<<"$row"
    lines+=("$(printf '%8d %8d  %s' "$seconds" "$budget" "$name")")
    [ "$seconds" -le "$budget" ] || over+=("$name")
  done
  printf '\n==== stages\n'
  printf '%s\n' "${lines[@]}" "$(printf '%8d %8s  %s' "$SECONDS" "" "all so far")"
  # For the last stage, whose pytest ends the table above its closing line.
  DIFFULEX_STAGES="$(printf '%s\n' "${lines[@]}")"
  DIFFULEX_STAGES_START="$((EPOCHSECONDS - SECONDS))"
  export DIFFULEX_STAGES DIFFULEX_STAGES_START
  [ "${#over[@]}" -eq 0 ] || die "stages over their budget: $(printf '%s, ' "${over[@]}" | sed 's/, $//')"
}

# beside <log> <command>...: runs a command of one core while the stage goes on, with what it says in a
# file; beside_end waits for it, shows what it said, and fails if it did.
beside() {
  beside_log="$1"
  shift
  ("$@") >"$beside_log" 2>&1 &
  beside_pid=$!
}
beside_end() {
  local status=0
  wait "$beside_pid" || status=$?
  cat "$beside_log"
  return "$status"
}

# report_failure <exit code>: for a trap on EXIT, which runs once and only when the run ends. One on ERR
# also runs in command substitutions whose failure is an answer, as that of dpkg-query is.
report_failure() {
  local name="${stage_name:-stages}"
  [ "$1" -eq 0 ] || printf '==== FAILED in stage: %s (after %d s)\n' "$name" "$SECONDS" >&2
}
