(function () {
  var DIGITS = '%DIGITS%', LEVELS = %LEVELS%;
  var root = document.documentElement, tip = document.createElement('div');
  root.classList.add('js');
  tip.id = 'tip'; tip.hidden = true; document.body.appendChild(tip);
  function show(text, event) {
    tip.textContent = text; tip.hidden = false;
    var box = tip.getBoundingClientRect();
    var x = Math.min(event.clientX + 14, innerWidth - box.width - 8), y = event.clientY + 16;
    if (y + box.height > innerHeight - 8) y = event.clientY - box.height - 12;
    tip.style.left = Math.max(8, x) + 'px'; tip.style.top = y + 'px';
  }
  function hide() { tip.hidden = true; }
  document.querySelectorAll('figure svg title').forEach(function (title) {
    var mark = title.parentNode;
    mark.setAttribute('aria-label', title.textContent);
    if (!mark.closest('.map')) {
      var text = title.textContent;
      mark.addEventListener('mousemove', function (event) { show(text, event); });
      mark.addEventListener('mouseleave', hide);
    }
    title.remove();
  });
  function cells(box, words) {
    box.addEventListener('mousemove', function (event) {
      var svg = box.querySelector('svg'), rect = svg.getBoundingClientRect(), size = svg.viewBox.baseVal;
      var column = Math.floor((event.clientX - rect.left) / rect.width * size.width);
      var row = Math.floor((event.clientY - rect.top) / rect.height * size.height);
      var text = row < 0 || column < 0 ? '' : words(row, column);
      if (text) show(text, event); else hide();
    });
    box.addEventListener('mouseleave', hide);
  }
  document.querySelectorAll('[data-heat]').forEach(function (box) {
    var heat = JSON.parse(box.dataset.heat);
    cells(box, function (layer, expert) {
      var row = heat.counts[layer];
      if (!row || row[expert] === undefined) return '';
      var visits = heat.visits[layer], percent = (100 * row[expert] / visits).toFixed(1);
      var needed = '\nneeded in ' + row[expert] + ' of ' + visits + ' visits (' + percent + '%)';
      return 'layer ' + layer + ', expert ' + expert + needed;
    });
  });
  var selects = [];  // of one model: all maps show the same layer
  document.querySelectorAll('[data-use]').forEach(function (box) {
    var use = JSON.parse(box.dataset.use), svg = box.querySelector('svg'), columns = use.begins.length;
    var select = box.closest('figure').querySelector('[data-layers]');
    var rows = box.parentNode.querySelector('.y-ticks'), step = 1;
    function share(layer, expert, column) { return DIGITS.indexOf(use.layers[layer][expert * columns + column]); }
    function draw(layer) {
      var paths = [], n = use.experts[layer];
      for (var expert = 0; expert < n; expert++) for (var column = 0; column < columns; column++) {
        var shade = Math.ceil(share(layer, expert, column) / (DIGITS.length - 1) * (LEVELS - 1));
        paths[shade] = (paths[shade] || '') + 'M' + column + ' ' + expert + '.5h.9';
      }
      svg.setAttribute('viewBox', '0 0 ' + columns + ' ' + Math.max(1, n));
      svg.innerHTML = paths.map(function (d, shade) { return '<path class="h' + shade + '" d="' + d + '"/>'; }).join('');
      svg.setAttribute('aria-label', 'Experts needed over time: layer ' + layer + ', ' + n + ' experts.');
      for (step = 1; n > 16 * step;) step *= 2;
      rows.innerHTML = '';
      for (expert = 0; expert < n; expert += step) {
        var tick = document.createElement('span');
        tick.textContent = expert; tick.style.top = 100 * (expert + 0.5) / n + '%'; rows.appendChild(tick);
      }
    }
    cells(box, function (expert, column) {
      var layer = Number(select.value);
      if (expert >= use.experts[layer] || column >= columns) return '';
      var first = use.begins[column] + 1, last = column + 1 < columns ? use.begins[column + 1] : use.end;
      var passes = first === last ? 'pass ' + first : 'passes ' + first + ' to ' + last;
      var percent = Math.round(100 * share(layer, expert, column) / (DIGITS.length - 1));
      return 'layer ' + layer + ', expert ' + expert + '\n' + passes + ': needed in ' + percent + '%';
    });
    select.hidden = false; select.previousSibling.hidden = true;
    select.addEventListener('change', function () { draw(Number(select.value)); });
    selects.push(select);
  });
  selects.forEach(function (select) {
    select.addEventListener('input', function () {
      selects.forEach(function (other) {
        if (other !== select) { other.value = select.value; other.dispatchEvent(new Event('change')); }
      });
    });
  });
  var tabs = Array.from(document.querySelectorAll('.tabs button')), panels = document.querySelectorAll('.run');
  function select(n) {
    tabs.forEach(function (tab, i) {
      tab.setAttribute('aria-selected', String(i === n)); tab.tabIndex = i === n ? 0 : -1; panels[i].hidden = i !== n;
    });
  }
  tabs.forEach(function (tab, i) {
    tab.addEventListener('click', function () { select(i); });
    tab.addEventListener('keydown', function (event) {
      var step = {ArrowRight: 1, ArrowLeft: -1}[event.key];
      if (step) { var n = (i + step + tabs.length) % tabs.length; select(n); tabs[n].focus(); }
    });
  });
  if (tabs.length) select(tabs.length - 1);
  var button = document.getElementById('theme');
  button.hidden = false;
  button.addEventListener('click', function () {
    var dark = root.dataset.theme ? root.dataset.theme === 'dark' : matchMedia('(prefers-color-scheme: dark)').matches;
    root.dataset.theme = dark ? 'light' : 'dark';
  });
})();
