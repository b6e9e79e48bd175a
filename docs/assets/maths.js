// Formulas, rendered by the KaTeX beside this file: no request leaves the site.
document$.subscribe(({ body }) =>
  renderMathInElement(body, {
    delimiters: [
      { left: "\\[", right: "\\]", display: true },
      { left: "\\(", right: "\\)", display: false },
    ],
  })
);
