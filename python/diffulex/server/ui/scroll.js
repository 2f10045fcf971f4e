// SPDX-License-Identifier: Apache-2.0
// Lists that stay at their end while they grow, unless a person looks at something else.

const NEAR_PX = 60;

export class EndKeeper {
  constructor(list) {
    this.list = list;
    // Not before there is something to follow.
    this.isAtEnd = false;
    list.addEventListener("scroll", () => {
      this.isAtEnd = list.scrollHeight - list.scrollTop - list.clientHeight < NEAR_PX;
    });
    const keep = () => {
      if (this.isAtEnd) list.scrollTop = list.scrollHeight;
    };
    new ResizeObserver(keep).observe(list);
    new MutationObserver(keep).observe(list, { childList: true, subtree: true, characterData: true });
  }

  toStart() {
    this.isAtEnd = false;
    this.list.scrollTop = 0;
  }

  toEnd() {
    this.isAtEnd = true;
    this.list.scrollTop = this.list.scrollHeight;
  }
}
