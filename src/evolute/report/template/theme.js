try { const kept = localStorage.getItem("evolute-theme"); if (kept) document.documentElement.dataset.theme = kept; } catch { /* no storage here: the system decides */ }
