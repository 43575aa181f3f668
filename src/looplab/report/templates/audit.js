"use strict";
// A click on a column head sorts its table; a click on a number shows where it stands in results.json, unrounded.
const order = (row, column) => {
  const cell = row.cells[column];
  return "order" in cell.dataset ? Number(cell.dataset.order) : cell.textContent.trim();
};
const compare = (a, b) =>
  typeof a === typeof b ? (typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true })) : typeof a === "number" ? -1 : 1;
for (const head of document.querySelectorAll("th"))
  head.querySelector("button").addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const body = head.closest("table").tBodies[0], column = head.cellIndex;
    const rows = [...body.rows].sort((a, b) => compare(order(a, column), order(b, column)));
    body.append(...(down ? rows.reverse() : rows));
  });
const records = [...document.querySelectorAll("script.results")].map((script) => JSON.parse(script.textContent));
const look = (path, record) =>
  [...path.matchAll(/\["([^"]*)"\]|\[(\d+)\]|([^.[\]]+)/g)].reduce((value, [, text, index, name]) => value[text ?? index ?? name], record);
const pane = document.getElementById("key");
document.addEventListener("click", (event) => {
  const number = event.target.closest("a.n");
  if (number) {
    event.preventDefault();
    const { key, home = 0 } = number.dataset;
    pane.querySelector("code").textContent = `results.json  ${key} = ${JSON.stringify(look(key, records[home]), null, 1)}`;
  }
  pane.hidden = !number && (!pane.contains(event.target) || event.target.tagName === "BUTTON");
});
document.addEventListener("keydown", (event) => { if (event.key === "Escape") pane.hidden = true; });
