//! Drawing of the live view: a line of kinds, a table or the numbers of one guest, and a line of keys.
//!
//! All texts come from [`Column::cell`](super::columns::Column::cell) or pass through `printable`: names are those of
//! guests. Colours only repeat what the text says, and are left out on request.

use std::fmt::Write as _;

use ratatui_core::buffer::Buffer;
use ratatui_core::layout::Rect;
use ratatui_core::style::{Color, Modifier, Style};
use ratatui_core::text::Span;
use ringfence_hostnet::text::{byte_count, printable, wrapped};

use super::app::App;
use super::columns::{Cell, Column, byte_rate, columns_of, short_rate};
use super::model::Row;
use super::sample::{Kind, is_drop};

/// Most characters of a text in a table.
const TEXT_MAX: usize = 24;
/// Blanks between two columns.
const GAP: u16 = 2;
const KEYS: &str = " q quit  Tab kind  s sort  r reverse  / filter  Enter open  p pause  ? help";
const KEYS_OF_TEXT: &str = " Esc back  Up/Down scroll  p pause  q quit";

const HELP: &str = "\
Tab, Right, Left, 1 to 6  kind of rows: guests, vifs, vbds, uplinks, fronts,
                          driver domains
s, S                      sort by the next column, by the one before
r                         reverse the order
Up, Down, j, k            select a row; also PageUp, PageDown, Home, End
Enter                     all numbers of the guest or front of that row
/                         only rows whose name, guest or place has this text;
                          Esc clears it
p, Space                  pause
?, h                      this help
q, Ctrl-C                 quit

Directions are the guest's: SENT to its switch, UP to the host's network.
10k is 10,000, 10M is 10,000,000. A rate that is not known yet is `-`.
DROPS: dropped frames and packets; MOST FOR: the most frequent reason.
RULES: rules of the protocols that the guest broke. QUEUE: requests that wait.
LENT, MAPPED: memory that the driver domain can use, and that it has mapped.
STAGED: what the guest had it map. SEEN: memory of a machine that a front sees.";

/// Styles, with or without colours.
#[derive(Clone, Copy)]
pub(super) struct Theme {
    pub(super) has_colours: bool,
}

impl Theme {
    fn with(self, style: Style, colour: Color) -> Style {
        if self.has_colours { style.fg(colour) } else { style }
    }

    fn head(self) -> Style {
        self.with(Style::new().add_modifier(Modifier::BOLD), Color::Cyan)
    }

    fn sorted(self) -> Style {
        self.head().add_modifier(Modifier::UNDERLINED)
    }

    fn warning(self) -> Style {
        self.with(Style::new().add_modifier(Modifier::BOLD), Color::Red)
    }

    fn remark(self) -> Style {
        self.with(Style::new().add_modifier(Modifier::BOLD), Color::Yellow)
    }

    fn bar(self) -> Style {
        Style::new().add_modifier(Modifier::REVERSED)
    }
}

/// Draws the view on a whole screen.
pub(super) fn draw(buffer: &mut Buffer, app: &mut App, theme: Theme) {
    let area = buffer.area;
    if area.height < 4 || area.width < 20 {
        put(buffer, area, 0, "too small", theme.remark());
        return;
    }
    draw_kinds(buffer, area, app, theme);
    let remarks = app.view.remarks.len().min(usize::from(area.height / 4));
    let used = u16::try_from(remarks).unwrap_or(0);
    let body = Rect { y: area.y + 1, height: area.height - 2 - used, ..area };
    if app.is_help {
        let lines = HELP.lines().map(|line| (line.to_owned(), Style::new())).collect();
        draw_text(buffer, body, lines, &mut app.scroll);
    } else if let Some(owner) = app.open.clone() {
        let lines = lines_of_guest(&app.view.parts(&owner), body.width, theme);
        draw_text(buffer, body, lines, &mut app.scroll);
    } else {
        draw_table(buffer, body, app, theme);
    }
    for (line, remark) in (body.bottom()..).zip(app.view.remarks.iter().take(remarks)) {
        put(buffer, area, line, &printable(remark), theme.remark());
    }
    draw_keys(buffer, area, app, theme);
}

fn draw_kinds(buffer: &mut Buffer, area: Rect, app: &App, theme: Theme) {
    fill(buffer, area, area.y, theme.bar());
    let mut at = area.x;
    for (number, kind) in (1..).zip(Kind::ALL) {
        let text = format!(" {number} {} {} ", kind.plural(), app.view.count(kind));
        let style = if kind == app.kind { theme.sorted() } else { theme.bar() };
        let left = usize::from(area.right().saturating_sub(at));
        at = buffer.set_stringn(at, area.y, &text, left, style).0;
    }
    let mut state = app.view.interval_seconds.map_or_else(String::new, |s| format!("{s:.1} s "));
    if app.is_paused {
        state.insert_str(0, "PAUSED ");
    }
    if app.filter.is_empty() && !app.is_typing {
        put_right(buffer, area, at, &state, theme.bar());
    } else {
        put_right(buffer, area, at, &format!("filter {} {state}", app.filter), theme.bar());
    }
}

fn draw_keys(buffer: &mut Buffer, area: Rect, app: &App, theme: Theme) {
    let line = area.bottom() - 1;
    fill(buffer, area, line, theme.bar());
    let text = match () {
        () if app.is_typing => format!(" filter: {}_   Enter keeps it, Esc clears it", app.filter),
        () if app.is_help || app.open.is_some() => KEYS_OF_TEXT.to_owned(),
        () if app.filter.is_empty() => KEYS.to_owned(),
        // The first line has no room for it in a narrow terminal.
        () => format!(" filter {}  {}", app.filter, KEYS.trim_start()),
    };
    put(buffer, area, line, &text, theme.bar());
}

/// Columns of a table that fit in a width, with their cells.
pub(super) struct Table {
    /// Head of each column, with the mark of the order.
    heads: Vec<String>,
    cells: Vec<Vec<Cell>>,
    widths: Vec<usize>,
    columns: &'static [Column],
}

impl Table {
    /// Lays out the columns of a kind, as many as fit. `sorted` is the number and the order of the sorted column.
    pub(super) fn new(
        kind: Kind,
        rows: &[&Row],
        sorted: Option<(usize, bool)>,
        width: usize,
    ) -> Table {
        let columns = columns_of(kind);
        let heads = columns.iter().enumerate().map(|(number, column)| match sorted {
            Some((at, true)) if at == number => format!("{}↓", column.head),
            Some((at, false)) if at == number => format!("{}↑", column.head),
            _ => column.head.to_owned(),
        });
        let heads: Vec<String> = heads.collect();
        let cells: Vec<Vec<Cell>> = rows
            .iter()
            .map(|row| columns.iter().map(|column| column.cell(row)).collect())
            .collect();
        let mut widths = Vec::new();
        let mut used = 0;
        for (number, column) in columns.iter().enumerate() {
            // The mark of the order has room, so that columns do not move.
            let head = column.head.len() + usize::from(sorted.is_some());
            let texts = cells.iter().map(|row| width_of(&row[number].text));
            let max = if sorted.is_some() { TEXT_MAX } else { usize::MAX };
            let wanted = texts.max().unwrap_or(0).min(max).max(head);
            let gap = if number == 0 { 0 } else { usize::from(GAP) };
            if used + gap + wanted > width {
                break;
            }
            used += gap + wanted;
            widths.push(wanted);
        }
        Table { heads, cells, widths, columns }
    }

    /// Returns a text as wide as its column.
    fn aligned(&self, number: usize, text: &str) -> String {
        let width = self.widths[number];
        let mut short = String::new();
        let mut used = 0;
        for c in text.chars() {
            used += width_of(c.encode_utf8(&mut [0; 4]));
            if used > width {
                break;
            }
            short.push(c);
        }
        let blanks = " ".repeat(width - width_of(&short).min(width));
        if self.columns[number].is_number() { blanks + &short } else { short + &blanks }
    }

    /// Writes the table as lines of text.
    pub(super) fn to_lines(&self) -> String {
        let mut text = String::new();
        let mut add = |cells: Vec<String>| {
            // Writing to a `String` never fails.
            let _ = writeln!(text, "{}", cells.join("  ").trim_end());
        };
        let numbers = || 0..self.widths.len();
        add(numbers().map(|number| self.aligned(number, &self.heads[number])).collect());
        for row in &self.cells {
            add(numbers().map(|number| self.aligned(number, &row[number].text)).collect());
        }
        text
    }
}

fn draw_table(buffer: &mut Buffer, area: Rect, app: &App, theme: Theme) {
    let (rows, sort) = (app.rows(), app.sort());
    let selected = app.selected(&rows);
    // One column is for the mark of the selected row.
    let width = usize::from(area.width) - 1;
    let table = Table::new(app.kind, &rows, Some((sort.column, sort.descending)), width);
    let mut at = area.x + 1;
    for number in 0..table.widths.len() {
        let style = if number == sort.column { theme.sorted() } else { theme.head() };
        let text = table.aligned(number, &table.heads[number]);
        at = buffer.set_stringn(at, area.y, &text, usize::MAX, style).0 + GAP;
    }
    let lines = usize::from(area.height.saturating_sub(1));
    let first = selected.saturating_sub(lines.saturating_sub(1));
    let shown = table.cells.iter().enumerate().skip(first).take(lines);
    for (line, (number, cells)) in (area.y + 1..).zip(shown) {
        let is_selected = number == selected;
        let own = if is_selected { theme.bar() } else { Style::new() };
        if is_selected {
            fill(buffer, area, line, own);
            put(buffer, area, line, ">", own);
        }
        let mut at = area.x + 1;
        for (number, cell) in cells.iter().enumerate().take(table.widths.len()) {
            let warns =
                table.columns[number].warns() && !matches!(cell.text.as_str(), "0" | "-" | "");
            let style = if warns { own.patch(theme.warning()) } else { own };
            let text = table.aligned(number, &cell.text);
            let width = table.widths[number];
            buffer.set_stringn(at, line, &text, width, style);
            at += u16::try_from(width).unwrap_or(u16::MAX).saturating_add(GAP);
        }
    }
    if rows.is_empty() {
        let what = app.kind.plural();
        let why = match (app.view.count(app.kind), app.view.interval_seconds) {
            (0, None) => "...".to_owned(),
            (0, Some(_)) => format!("no {what}"),
            (count, _) => format!("none of the {count} {what} matches the filter"),
        };
        put(buffer, area, area.y + 1, &format!(" {why}"), theme.remark());
    }
}

/// Returns the numbers of a guest or a front, and of all that belongs to it, that are not zero.
fn lines_of_guest(parts: &[&Row], width: u16, theme: Theme) -> Vec<(String, Style)> {
    let mut lines = Vec::new();
    for row in parts {
        let item = &row.item;
        let place =
            if item.place.is_empty() { String::new() } else { format!(" ({})", item.place) };
        let kind = item.kind.plural().trim_end_matches('s');
        let head = printable(&format!("{kind} {}{place}", item.name));
        let columns = usize::from(width).max(20);
        lines.extend(wrapped(&head, columns, "  ").into_iter().map(|line| (line, theme.head())));
        for (name, count) in item.counters.iter().filter(|(_, count)| **count > 0) {
            let rate = row.rates.as_ref().map(|rates| rates.get(name).copied().unwrap_or(0.0));
            let style = if is_drop(name) { theme.warning() } else { Style::new() };
            lines.push((number_line(name, *count, rate), style));
        }
        for (name, level) in &item.levels {
            lines.push((number_line(name, *level, None), Style::new()));
        }
        for (rule, count) in &item.rules {
            lines.push((number_line(&format!("broke {rule}"), *count, None), theme.warning()));
        }
        lines.push((String::new(), Style::new()));
    }
    if lines.is_empty() {
        lines.push(("it has ended".to_owned(), theme.remark()));
    }
    lines
}

fn number_line(name: &str, count: u64, rate: Option<f64>) -> String {
    let is_bytes = name.contains("bytes");
    let total = if is_bytes { byte_count(count) } else { count.to_string() };
    let name = printable(name);
    match rate.filter(|rate| *rate > 0.0) {
        Some(rate) => {
            let rate = if is_bytes { byte_rate(rate) } else { short_rate(rate) };
            format!("  {name:<26} {total:>14}  {rate:>10}/s")
        }
        None => format!("  {name:<26} {total:>14}"),
    }
}

/// Returns the number of columns that a text takes on a terminal.
fn width_of(text: &str) -> usize {
    Span::raw(text).width()
}

/// Draws lines from `scroll` on, which is reduced to what can be shown.
fn draw_text(buffer: &mut Buffer, area: Rect, lines: Vec<(String, Style)>, scroll: &mut usize) {
    let height = usize::from(area.height);
    *scroll = (*scroll).min(lines.len().saturating_sub(height));
    let shown = lines.into_iter().skip(*scroll).take(height);
    for (line, (text, style)) in (area.y..).zip(shown) {
        put(buffer, area, line, &text, style);
    }
}

fn put(buffer: &mut Buffer, area: Rect, line: u16, text: &str, style: Style) {
    buffer.set_stringn(area.x, line, text, usize::from(area.width), style);
}

/// Puts a text at the right end of the first line, if there is room behind the column `from`.
fn put_right(buffer: &mut Buffer, area: Rect, from: u16, text: &str, style: Style) {
    let width = u16::try_from(text.chars().count()).unwrap_or(u16::MAX);
    if let Some(at) = area.right().checked_sub(width).filter(|at| *at >= from) {
        buffer.set_stringn(at, area.y, text, usize::from(width), style);
    }
}

fn fill(buffer: &mut Buffer, area: Rect, line: u16, style: Style) {
    buffer.set_style(Rect { y: line, height: 1, ..area }, style);
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use ratatui_core::backend::TestBackend;
    use ratatui_core::terminal::Terminal;

    use super::super::app::Key;
    use super::super::model::View;
    use super::super::sample::{Item, Sample};
    use super::super::testing::{item, sample};
    use super::*;

    /// Returns a view with guests, each with a vif, two of which send.
    fn app(guests: u64) -> App {
        let start = Instant::now();
        let items = |factor: u64| {
            let mut sample = sample(start, vec![]);
            for number in 0..guests {
                let name = format!("guest{number}");
                let mut vif = item(
                    Kind::Vif,
                    &format!("vif{number}.0"),
                    &[("rx_bytes", number * factor * 1_000_000), ("drop_port_full", factor)],
                );
                vif.guest.clone_from(&name);
                vif.owner.clone_from(&name);
                vif.levels.insert("requests_waiting".to_owned(), 3);
                let guest = Item { place: "blue".to_owned(), ..item(Kind::Guest, &name, &[]) };
                sample.add_guest(guest, vec![vif]);
            }
            sample
        };
        let mut app = App::new();
        app.take(items(0));
        app.take(Sample { at: start + Duration::from_secs(1), ..items(1) });
        app
    }

    fn screen(app: &mut App, width: u16, height: u16, has_colours: bool) -> Terminal<TestBackend> {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        let theme = Theme { has_colours };
        terminal.draw(|frame| draw(frame.buffer_mut(), app, theme)).unwrap();
        terminal
    }

    fn lines(terminal: &Terminal<TestBackend>) -> Vec<String> {
        let buffer = terminal.backend().buffer();
        let width = usize::from(buffer.area.width);
        let symbols: Vec<&str> = buffer.content.iter().map(|cell| cell.symbol()).collect();
        symbols.chunks(width).map(|line| line.concat().trim_end().to_owned()).collect()
    }

    #[test]
    fn narrow_screen_has_the_first_columns_and_the_busiest_guest_at_the_top() {
        let lines = lines(&screen(&mut app(3), 80, 24, true));
        assert!(lines[0].starts_with(" 1 guests 3  2 vifs 3  3 vbds 0 "), "{lines:#?}");
        assert!(lines[0].ends_with(" 1.0 s"), "{lines:#?}");
        let heads: Vec<&str> = lines[1].split_whitespace().take(4).collect();
        assert_eq!(heads, ["GUEST", "SENT/s↓", "RECEIVED/s", "DROPS/s"], "{lines:#?}");
        assert!(!lines[1].contains("SWITCH"), "{lines:#?}");
        assert!(lines[2].starts_with(">guest2  1953 KiB          0 B       1.0 "), "{lines:#?}");
        assert!(lines[4].starts_with(" guest0"), "{lines:#?}");
        assert_eq!(lines[23], KEYS);
    }

    #[test]
    fn wide_screen_has_all_columns() {
        let lines = lines(&screen(&mut app(3), 200, 50, true));
        for column in columns_of(Kind::Guest) {
            assert!(lines[1].contains(column.head), "{}: {lines:#?}", column.head);
        }
        assert!(lines[2].ends_with("blue"), "{lines:#?}");
    }

    #[test]
    fn texts_of_a_column_take_the_same_columns_of_the_terminal() {
        let view = View::new(
            None,
            sample(
                Instant::now(),
                vec![item(Kind::Guest, "日本語", &[]), item(Kind::Guest, "ab", &[])],
            ),
        );
        let table = Table::new(Kind::Guest, &view.rows.iter().collect::<Vec<_>>(), None, 20);
        let widths = ["日本語", "ab", "日本語日本語"].map(|text| width_of(&table.aligned(0, text)));
        assert_eq!(widths, [6; 3]);
    }

    #[test]
    fn selected_row_is_on_the_screen_among_many() {
        let mut app = app(100);
        app.press(Key::End);
        let lines = lines(&screen(&mut app, 80, 24, true));
        assert!(lines[22].starts_with(">guest0 "), "{lines:#?}");
        assert!(lines[2].starts_with(" guest20 "), "{lines:#?}");
    }

    #[test]
    fn open_guest_shows_drops_by_reason_and_scrolls_no_further_than_its_end() {
        let mut app = app(3);
        app.press(Key::Enter);
        let shown = lines(&screen(&mut app, 80, 24, true)).join("\n");
        assert!(shown.contains("guest guest2 (blue)\n"), "{shown}");
        assert!(shown.contains("vif vif2.0\n"), "{shown}");
        assert!(
            shown.contains("  drop_port_full                          1         1.0/s\n"),
            "{shown}"
        );
        app.press(Key::End);
        screen(&mut app, 80, 8, true);
        assert!(app.scroll > 0 && app.scroll < 100);
        app.press(Key::Escape);
        app.take(sample(Instant::now(), vec![]));
        app.open = Some("guest2".to_owned());
        assert!(lines(&screen(&mut app, 80, 24, true))[1].starts_with("it has ended"));
    }

    #[test]
    fn help_fits_the_smallest_usual_screen() {
        let mut app = app(0);
        app.press(Key::Char('?'));
        let shown = lines(&screen(&mut app, 80, 24, false)).join("\n");
        for line in HELP.lines() {
            assert!(shown.contains(line), "{line}");
        }
        assert!(HELP.lines().count() <= 22);
    }

    #[test]
    fn screen_without_colours_has_none_and_marks_the_selected_row() {
        let terminal = screen(&mut app(3), 80, 24, false);
        let cells = &terminal.backend().buffer().content;
        assert!(cells.iter().all(|cell| (cell.fg, cell.bg) == (Color::Reset, Color::Reset)));
        assert!(lines(&terminal)[2].starts_with('>'));
        let coloured = screen(&mut app(3), 80, 24, true);
        assert!(coloured.backend().buffer().content.iter().any(|cell| cell.fg == Color::Red));
    }

    #[test]
    fn remarks_are_shown_without_control_characters_and_small_screens_do_not_panic() {
        let mut app = app(1);
        app.view.remarks = vec!["guest a\u{1b}[2J does not answer".to_owned()];
        let shown = lines(&screen(&mut app, 80, 24, true));
        assert_eq!(shown[22], "guest a\u{fffd}[2J does not answer");
        for (width, height) in [(1, 1), (20, 4), (21, 5), (3, 50), (200, 3)] {
            for keys in [&[][..], &[Key::Enter], &[Key::Char('?')], &[Key::Char('/')]] {
                keys.iter().for_each(|key| assert!(app.press(*key)));
                screen(&mut app, width, height, true);
            }
        }
    }
}
