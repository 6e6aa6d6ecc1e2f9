"use strict";
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  const value = (row, column) => {
    const text = row.cells[column].textContent.trim();
    if (!heads[column].classList.contains("number")) return text;
    const number = parseFloat(text.replaceAll(",", ""));
    return Number.isNaN(number) ? null : number;
  };
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const number = head.classList.contains("number");
      const before = head.getAttribute("aria-sort") || (number ? "ascending" : "descending");
      const down = before === "ascending";
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const sorted = [...body.rows].sort((one, other) => {
        const [a, b] = [value(one, column), value(other, column)];
        if (a === null || b === null) return (a === null) - (b === null);
        const order = number ? a - b : a.localeCompare(b, "en", { numeric: true });
        return down ? -order : order;
      });
      body.append(...sorted);
    });
  });
}
