// SPDX-License-Identifier: Apache-2.0
// Light, dark, or as the system: a button that goes through them.

const THEMES = ["system", "light", "dark"];
const THEME_NAME = "diffulex-theme";

function setTheme(button, theme) {
  const root = document.documentElement;
  if (theme === "system") delete root.dataset.theme;
  else root.dataset.theme = theme;
  button.textContent = { system: "◐", light: "☼", dark: "☾" }[theme];
  const name = theme === "system" ? "as the system" : theme;
  button.setAttribute("aria-label", `Colours: ${name}`);
  button.title = `Colours: ${name}`;
  button.dataset.theme = theme;
}

/** The choice outlives a reload. */
export function bindTheme(button) {
  const stored = localStorage.getItem(THEME_NAME);
  setTheme(button, THEMES.includes(stored) ? stored : "system");
  button.addEventListener("click", () => {
    const next = THEMES[(THEMES.indexOf(button.dataset.theme) + 1) % THEMES.length];
    localStorage.setItem(THEME_NAME, next);
    setTheme(button, next);
  });
}
