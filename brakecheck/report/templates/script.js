(function () {
  "use strict";
  var root = document.documentElement;
  document.getElementById("theme").addEventListener("click", function () {
    var dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    try { localStorage.setItem("brakecheck-theme", root.dataset.theme); } catch (e) { /* a file may have no storage */ }
  });

  document.querySelectorAll("section.table").forEach(function (section) {
    var body = section.querySelector("tbody"), rows = Array.from(body.rows);
    var find = section.querySelector("input"), state = section.querySelector("select"), out = section.querySelector("output");
    var texts = rows.map(function (row) { return row.textContent.toLowerCase(); });
    function filter() {
      var words = find.value.toLowerCase().split(/\s+/), shown = 0;
      rows.forEach(function (row, i) {
        var fits = (!state.value || row.dataset.state === state.value) && words.every(function (w) { return texts[i].includes(w); });
        row.hidden = !fits;
        shown += fits;
      });
      out.textContent = shown === rows.length ? rows.length + " rows" : shown + " of " + rows.length + " rows";
    }
    find.addEventListener("input", filter);
    state.addEventListener("change", filter);
    filter();

    var heads = Array.from(section.querySelectorAll("thead th"));
    heads.forEach(function (head) {
      var button = document.createElement("button"), kind = head.dataset.k;
      button.type = "button";
      button.append.apply(button, Array.from(head.childNodes));
      head.append(button);
      button.addEventListener("click", function () {
        var down = head.getAttribute("aria-sort") === "ascending";
        heads.forEach(function (h) { h.removeAttribute("aria-sort"); });
        head.setAttribute("aria-sort", down ? "descending" : "ascending");
        var keyed = rows.map(function (row) {
          var cell = row.cells[head.cellIndex], text = cell.dataset.v === undefined ? cell.textContent : cell.dataset.v;
          return [kind === "t" ? text : text === "" ? NaN : Number(text), row];
        });
        keyed.sort(function (a, b) {
          if (kind === "t") return a[0].localeCompare(b[0], "en", { numeric: true }) * (down ? -1 : 1);
          if (isNaN(a[0]) || isNaN(b[0])) return isNaN(a[0]) - isNaN(b[0]);   // what is unknown stays last
          return (a[0] - b[0]) * (down ? -1 : 1);
        });
        keyed.forEach(function (pair) { body.append(pair[1]); });
      });
    });
  });

  function open() {
    var target = /^#k\d+$/.test(location.hash) && document.querySelector(location.hash);
    if (target) { target.open = true; target.scrollIntoView(); }
  }
  addEventListener("hashchange", open);
  open();
  addEventListener("beforeprint", function () {
    Array.from(document.querySelectorAll("details.kernel")).slice(0, 12).forEach(function (d) { d.open = true; });
  });
})();
