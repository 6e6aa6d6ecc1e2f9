"use strict";
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  const text = (row, column) => row.cells[column].textContent.trim();
  const number = (row, column) => parseFloat(text(row, column).replaceAll(",", ""));
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const numeric = [...body.rows].some((row) => !Number.isNaN(number(row, column))) && column > 0;
      const value = numeric ? number : text;
      const down = (head.getAttribute("aria-sort") || (numeric ? "ascending" : "descending")) === "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const sorted = [...body.rows].sort((one, other) => {
        const [a, b] = [value(one, column), value(other, column)];
        if (Number.isNaN(a) || Number.isNaN(b)) return Number.isNaN(a) - Number.isNaN(b); // "missing" comes last
        const order = numeric ? a - b : a.localeCompare(b, "en", { numeric: true });
        return down ? -order : order;
      });
      body.append(...sorted);
    });
  });
}
