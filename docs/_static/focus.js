/* A box that scrolls sideways can be reached with the keyboard, and only while it does scroll. */
const boxes = "pre, .table-wrapper, div.math, mjx-container[display=true], figure"

const watch = new ResizeObserver((entries) => {
  for (const { target } of entries) {
    if (target.scrollWidth > target.clientWidth) target.tabIndex = 0
    else target.removeAttribute("tabindex")
  }
})

const begin = () => document.querySelectorAll(boxes).forEach((box) => watch.observe(box))
window.addEventListener("load", async () => {
  await window.MathJax?.startup?.promise
  begin()
})
