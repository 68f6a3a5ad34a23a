// Before the first paint: the theme that was chosen here, else the system's.
"use strict";
(() => {
  let chosen = null;
  try {
    chosen = localStorage.getItem("flatout-theme");
  } catch {
    // A browser that keeps nothing follows the system.
  }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
