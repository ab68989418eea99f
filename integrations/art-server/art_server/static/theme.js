// Applies the stored theme before the first paint; without one, the system's applies.
(() => {
  let stored = null;
  try {
    stored = localStorage.getItem("art-theme");
  } catch {
    /* storage may be disabled */
  }
  if (stored === "light" || stored === "dark") document.documentElement.dataset.theme = stored;
})();
