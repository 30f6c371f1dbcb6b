// Runs before the first paint, so that whoever chose dark never sees a white flash.
try {
  const theme = JSON.parse(localStorage.getItem("ferrum.settings") ?? "{}").theme;
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // No storage, or not ours: the system's choice holds.
}
