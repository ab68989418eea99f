// Before anything is drawn: light or dark as it was chosen last, else as the system says.
(() => {
  let chosen = null;
  try {
    chosen = localStorage.getItem("art-theme");
  } catch {
    /* storage may be switched off */
  }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
