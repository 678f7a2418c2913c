"use strict";
(() => {
  // Filters of the tables of events. They are hidden where no script runs.
  const fill = (select, rows, column) => {
    for (const value of new Set(rows.map((row) => row.cells[column].textContent.trim()))) {
      if (value) select.append(new Option(value, value));
    }
  };
  const arm = (root) => {
    for (const box of root.querySelectorAll(".events")) {
      const rows = [...box.querySelectorAll("tbody tr")];
      const [text, what, where] = box.querySelectorAll("input, select");
      fill(what, rows, 1);
      fill(where, rows, 2);
      const apply = () => {
        const wanted = text.value.toLowerCase();
        let shown = 0;
        for (const row of rows) {
          const cell = (column) => row.cells[column].textContent.trim();
          const fits = (!what.value || cell(1) === what.value) && (!where.value || cell(2) === where.value)
            && row.textContent.toLowerCase().includes(wanted);
          row.hidden = !fits;
          shown += fits;
        }
        box.querySelector("output").textContent = `${shown} of ${rows.length} events`;
      };
      for (const one of [text, what, where]) one.addEventListener("input", apply);
      box.querySelector("form").addEventListener("submit", (event) => event.preventDefault());
      box.querySelector("form").hidden = false;
      apply();
    }
  };
  arm(document);

  // What is folded is printed, too.
  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:not([open])")];
    for (const one of opened) one.open = true;
  });
  addEventListener("afterprint", () => { for (const one of opened) one.open = false; });

  // The page of a server asks for itself again and takes what has changed: filters and folds stay as they are.
  const seconds = Number(document.body.dataset.refresh);
  if (!seconds) return;
  let answered = new Date();
  const take = (fresh) => {
    document.title = fresh.title;
    for (const old of document.querySelectorAll("[data-live]")) {
      const made = fresh.getElementById(old.id);
      if (made) old.replaceWith(made);
    }
    const kept = document.getElementById("sections");
    const sections = [...fresh.querySelectorAll("#sections > *")].map((made) => {
      const old = made.id && document.getElementById(made.id);
      if (old && old.dataset.mark === made.dataset.mark) return old;
      arm(made);
      return made;
    });
    kept.replaceChildren(...sections);
  };
  const refresh = async () => {
    const late = document.getElementById("late");
    try {
      const answer = await fetch(location.href, { cache: "no-store", signal: AbortSignal.timeout(1000 * seconds) });
      if (!answer.ok) throw new Error(answer.statusText);
      take(new DOMParser().parseFromString(await answer.text(), "text/html"));
      answered = new Date();
      late.textContent = "";
    } catch {
      late.textContent = `This page is old: the server has not answered since ${answered.toLocaleTimeString()}.`;
    }
    setTimeout(refresh, 1000 * seconds);
  };
  setTimeout(refresh, 1000 * seconds);
})();
