(() => {
  const luminance = ([r, g, b]) => {
    const part = (value) => {
      const share = value / 255;
      return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
    };
    return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  };
  const numbers = (colour) => colour.match(/[\d.]+/g).map(Number);
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = numbers(getComputedStyle(at).backgroundColor);
      if (colour.length < 4 || colour[3] === 1) return colour;
    }
    return [255, 255, 255];
  };
  const contrast = (one, other) => {
    const [a, b] = [luminance(one) + 0.05, luminance(other) + 0.05];
    return Math.max(a, b) / Math.min(a, b);
  };
  const shown = (element) => element.checkVisibility() && element.getBoundingClientRect().width > 0;
  const texts = [];
  let smallest = Infinity;
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const element = node.parentElement;
    if (!node.data.trim() || !shown(element) || element.closest('title, desc')) continue;
    const style = getComputedStyle(element);
    const colour = numbers(element.closest('svg') ? style.fill : style.color);
    smallest = Math.min(smallest, parseFloat(style.fontSize));
    texts.push({ text: node.data.trim().slice(0, 40), ratio: contrast(colour, behind(element)) });
  }
  // Half a pixel is rounding.
  const outside = [], overlaps = [];
  const charts = [...document.querySelectorAll('svg')].map((svg) => {
    const whole = svg.getBoundingClientRect();
    const words = [...svg.querySelectorAll('text')];
    const boxes = words.map((word) => word.getBoundingClientRect());
    boxes.forEach((box, n) => {
      const beyond = box.left < whole.left - 0.5 || box.right > whole.right + 0.5 || box.bottom > whole.bottom + 0.5;
      if (beyond) outside.push(words[n].textContent);
      for (let m = 0; m < n; m++) {
        const other = boxes[m];
        const over = box.left < other.right - 0.5 && other.left < box.right - 0.5;
        // Boxes of lines above each other may touch.
        if (over && box.top < other.bottom - 3 && other.top < box.bottom - 3) {
          overlaps.push(words[m].textContent + ' | ' + words[n].textContent);
        }
      }
    });
    const count = (selector) => [...svg.querySelectorAll(selector)].length;
    return { width: whole.width, height: whole.height, bars: count('.bar'), lines: count('.line') };
  });
  const root = document.documentElement;
  return {
    scheme: matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light',
    overflow: Math.max(root.scrollWidth, document.body.scrollWidth) - root.clientWidth,
    contrast: texts,
    smallest,
    charts,
    outside,
    overlaps,
  };
})()
