// Sortable tables. Rows of methods that are not selected are left out.
const tables = new Map(); // name → function that fills the table

const fillTables = () => { for (const fill of tables.values()) fill(); };
const compare = (a, b) => (a === undefined || b === undefined ? (a === undefined) - (b === undefined) : typeof a === "string" ? a.localeCompare(b) : a - b);

function cellOf(cell, column) {
  const element = make("td", { "data-name": column.name, ...(cell.title && { title: cell.title }) });
  const text = cell.text ?? ""; // empty texts are left out of the data
  element.append(cell.strong ? make("b", {}, text) : text);
  if (cell.spread) element.append(make("small", {}, ` ${cell.spread}`));
  if (cell.mark) element.append(make("sup", {}, cell.mark));
  if (cell.badge) element.append(make("span", { class: "badge" }, cell.badge));
  return element;
}

function tableOf(table) {
  const body = make("tbody"), more = make("p", { class: "more" });
  const heads = table.columns.map((column, i) => {
    const button = make("button", { type: "button", title: column.help ?? "" }, column.name);
    button.addEventListener("click", () => { sorted.set(table.name, [i, sorted.get(table.name)?.[0] === i ? -sorted.get(table.name)[1] : i === 0 ? 1 : -1]); remember(); fill(); });
    return make("th", { scope: "col" }, button);
  });
  function fill() {
    const [column, direction] = sorted.get(table.name) ?? [-1, 1];
    heads.forEach((head, i) => i === column ? head.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending") : head.removeAttribute("aria-sort"));
    const all = table.rows.map((_, i) => i);
    const order = all.filter((i) => !table.groups || !hidden.has(table.groups[i]));
    if (column >= 0 && column < table.columns.length) order.sort((a, b) => {
      const [one, other] = [table.rows[a][column].value, table.rows[b][column].value];
      return one === undefined || other === undefined ? compare(one, other) : direction * compare(one, other);
    });
    body.replaceChildren(...order.map((i) => {
      const cells = table.rows[i].map((cell, place) => cellOf(cell, table.columns[place]));
      const entry = table.groups && methods().find((one) => one.group === table.groups[i]);
      if (entry) cells[0].prepend(swatch(entry));
      return make("tr", table.groups ? { "data-group": table.groups[i] } : {}, ...cells);
    }));
    const left = all.length - order.length;
    more.hidden = !left;
    if (left) {
      const button = make("button", { type: "button", class: "link" }, "Show all methods");
      button.addEventListener("click", () => select(new Set(methods().map((one) => one.group))));
      more.replaceChildren(`${order.length} of ${all.length} rows, those of selected methods. `, button);
    }
  }
  tables.set(table.name, fill);
  fill();
  const whole = make("div", { class: "table" }, make("table", { id: `table-${table.name}` }, make("thead", {}, make("tr", {}, ...heads)), body), more);
  if (table.note) whole.append(make("p", {}, table.note));
  return whole;
}
