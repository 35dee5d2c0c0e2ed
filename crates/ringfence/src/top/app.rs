//! State of the live view, and the keys that change it.

use super::columns::columns_of;
use super::model::{Row, Sort, View};
use super::sample::{Kind, Sample};

/// Keys that the view knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Key {
    Up,
    Down,
    PageUp,
    PageDown,
    Home,
    End,
    Left,
    Right,
    Tab,
    BackTab,
    Enter,
    Escape,
    Backspace,
    Char(char),
}

/// Rows that a page key moves.
const PAGE: usize = 10;
/// Most characters of a filter.
const FILTER_MAX: usize = 64;

/// State of the view.
pub(super) struct App {
    pub(super) view: View,
    /// Sample from which the next rates are computed.
    last: Option<Sample>,
    pub(super) kind: Kind,
    sorts: [Sort; Kind::ALL.len()],
    pub(super) filter: String,
    /// Set while the filter is typed.
    pub(super) is_typing: bool,
    /// Key and name of the selected row. It stays selected when the order changes.
    selected: Option<(String, String)>,
    /// Guest or front that is open.
    pub(super) open: Option<String>,
    /// First line of the open guest, or of the help, on the screen.
    pub(super) scroll: usize,
    pub(super) is_paused: bool,
    pub(super) is_help: bool,
}

impl App {
    /// Shows the guests, the busiest sender first.
    pub(super) fn new() -> App {
        App {
            view: View::default(),
            last: None,
            kind: Kind::Guest,
            sorts: Kind::ALL.map(|kind| {
                let is_rate = |head: &str| head.ends_with("/s");
                let busiest = columns_of(kind).iter().position(|column| is_rate(column.head));
                Sort::by(kind, busiest.unwrap_or(0))
            }),
            filter: String::new(),
            is_typing: false,
            selected: None,
            open: None,
            scroll: 0,
            is_paused: false,
            is_help: false,
        }
    }

    /// Takes a sample, unless the view is paused.
    pub(super) fn take(&mut self, sample: Sample) {
        if !self.is_paused {
            self.view = View::new(self.last.as_ref(), sample.clone());
            self.last = Some(sample);
        }
    }

    /// Returns the order of the rows of the shown kind.
    pub(super) fn sort(&self) -> Sort {
        self.sorts[self.kind as usize]
    }

    fn sort_mut(&mut self) -> &mut Sort {
        &mut self.sorts[self.kind as usize]
    }

    /// Returns the rows of the shown kind.
    pub(super) fn rows(&self) -> Vec<&Row> {
        self.view.rows_of(self.kind, self.sort(), &self.filter)
    }

    /// Returns the number of the selected row among these.
    pub(super) fn selected(&self, rows: &[&Row]) -> usize {
        let is_selected = |row: &&Row| {
            self.selected
                .as_ref()
                .is_some_and(|(owner, name)| (owner, name) == (&row.item.owner, &row.item.name))
        };
        rows.iter().position(is_selected).unwrap_or(0)
    }

    /// Handles a key. Returns `false` if the view ends.
    pub(super) fn press(&mut self, key: Key) -> bool {
        if self.is_typing {
            self.type_filter(key);
            return true;
        }
        match key {
            Key::Char('q' | '\u{3}') => return false,
            Key::Char('?' | 'h') => {
                self.is_help = !self.is_help;
                self.scroll = 0;
            }
            Key::Char('p' | ' ') => self.is_paused = !self.is_paused,
            _ if self.is_help || self.open.is_some() => self.press_in_text(key),
            Key::Escape => self.filter.clear(),
            _ => self.press_in_table(key),
        }
        true
    }

    fn type_filter(&mut self, key: Key) {
        match key {
            Key::Enter => self.is_typing = false,
            Key::Escape | Key::Char('\u{3}') => {
                self.is_typing = false;
                self.filter.clear();
            }
            Key::Backspace => {
                self.filter.pop();
            }
            Key::Char(c) if !c.is_control() && self.filter.chars().count() < FILTER_MAX => {
                self.filter.push(c);
            }
            _ => {}
        }
    }

    /// Handles a key while a guest or the help covers the table.
    fn press_in_text(&mut self, key: Key) {
        match key {
            Key::Escape | Key::Enter | Key::Left | Key::Backspace => {
                if self.is_help {
                    self.is_help = false;
                } else {
                    self.open = None;
                }
                self.scroll = 0;
            }
            Key::Up | Key::Char('k') => self.scroll = self.scroll.saturating_sub(1),
            Key::Down | Key::Char('j') => self.scroll = self.scroll.saturating_add(1),
            Key::PageUp => self.scroll = self.scroll.saturating_sub(PAGE),
            Key::PageDown => self.scroll = self.scroll.saturating_add(PAGE),
            Key::Home | Key::Char('g') => self.scroll = 0,
            Key::End | Key::Char('G') => self.scroll = usize::MAX,
            _ => {}
        }
    }

    fn press_in_table(&mut self, key: Key) {
        let columns = columns_of(self.kind).len();
        match key {
            Key::Tab | Key::Right => self.show(1),
            Key::BackTab | Key::Left => self.show(Kind::ALL.len() - 1),
            Key::Char(digit @ '1'..='6') => {
                let number = digit.to_digit(10).map_or(0, |digit| digit as usize - 1);
                self.kind = Kind::ALL[number];
            }
            Key::Char('s') => {
                *self.sort_mut() = Sort::by(self.kind, (self.sort().column + 1) % columns)
            }
            Key::Char('S') => {
                let column = (self.sort().column + columns - 1) % columns;
                *self.sort_mut() = Sort::by(self.kind, column);
            }
            Key::Char('r') => self.sort_mut().descending ^= true,
            Key::Char('/') => self.is_typing = true,
            Key::Up | Key::Char('k') => self.select(|at, _| at.saturating_sub(1)),
            Key::Down | Key::Char('j') => self.select(|at, _| at + 1),
            Key::PageUp => self.select(|at, _| at.saturating_sub(PAGE)),
            Key::PageDown => self.select(|at, _| at + PAGE),
            Key::Home | Key::Char('g') => self.select(|_, _| 0),
            Key::End | Key::Char('G') => self.select(|_, count| count),
            Key::Enter => {
                let rows = self.rows();
                let row = rows.get(self.selected(&rows));
                let owner = row.map(|row| row.item.owner.clone()).filter(|owner| !owner.is_empty());
                self.open = owner;
                self.scroll = 0;
            }
            _ => {}
        }
    }

    /// Shows the kind that is `by` places on.
    fn show(&mut self, by: usize) {
        self.kind = Kind::ALL[(self.kind as usize + by) % Kind::ALL.len()];
    }

    /// Selects the row that `to` returns for the number of the selected one and the number of rows.
    fn select(&mut self, to: impl Fn(usize, usize) -> usize) {
        let rows = self.rows();
        let last = rows.len().saturating_sub(1);
        let at = to(self.selected(&rows), last).min(last);
        let selected = rows.get(at).map(|row| (row.item.owner.clone(), row.item.name.clone()));
        self.selected = selected;
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::super::testing::{item, sample};
    use super::*;

    /// Returns a view of three guests, of which `b` sends most.
    fn app() -> App {
        let start = Instant::now();
        let guests = |counts: [u64; 3]| {
            let named = ["a", "b", "c"].into_iter().zip(counts);
            named.map(|(name, n)| item(Kind::Guest, name, &[("sent_bytes", n)])).collect()
        };
        let mut app = App::new();
        app.take(sample(start, guests([0, 0, 0])));
        app.take(sample(start + Duration::from_secs(1), guests([1, 9, 5])));
        app
    }

    fn press(app: &mut App, keys: &[Key]) {
        for key in keys {
            assert!(app.press(*key), "{key:?} ends the view");
        }
    }

    fn names(app: &App) -> String {
        app.rows().iter().map(|row| row.item.name.as_str()).collect()
    }

    #[test]
    fn keys_sort_reverse_and_filter() {
        let mut app = app();
        assert_eq!(names(&app), "bca", "the busiest sender is first");
        press(&mut app, &[Key::Char('r')]);
        assert_eq!(names(&app), "acb");
        press(&mut app, &[Key::Char('S')]);
        assert_eq!((app.sort().column, names(&app).as_str()), (0, "abc"));
        press(
            &mut app,
            &[Key::Char('/'), Key::Char('q'), Key::Backspace, Key::Char('B'), Key::Enter],
        );
        assert_eq!(names(&app), "b");
        press(&mut app, &[Key::Escape]);
        assert_eq!(names(&app), "abc");
    }

    #[test]
    fn selected_row_stays_selected_when_the_order_changes() {
        let mut app = app();
        press(&mut app, &[Key::Down]);
        let name = |app: &App| app.rows()[app.selected(&app.rows())].item.name.clone();
        assert_eq!(name(&app), "c");
        press(&mut app, &[Key::Char('S')]);
        assert_eq!((name(&app).as_str(), app.selected(&app.rows())), ("c", 2));
        press(&mut app, &[Key::PageDown, Key::End, Key::Down]);
        assert_eq!(app.selected(&app.rows()), 2, "there is no row behind the last");
    }

    #[test]
    fn enter_opens_the_selected_guest_and_escape_closes_it() {
        let mut app = app();
        press(&mut app, &[Key::Down, Key::Enter]);
        assert_eq!(app.open.as_deref(), Some("c"));
        press(&mut app, &[Key::Char('?'), Key::Escape]);
        assert!(app.open.is_some() && !app.is_help, "the help covers the guest");
        press(&mut app, &[Key::Escape]);
        assert_eq!(app.open, None);
        assert!(!app.press(Key::Char('q')));
    }

    #[test]
    fn paused_view_takes_no_sample() {
        let mut app = app();
        press(&mut app, &[Key::Char('p')]);
        app.take(sample(Instant::now(), vec![]));
        assert_eq!(names(&app), "bca");
        press(&mut app, &[Key::Char('p')]);
        app.take(sample(Instant::now(), vec![]));
        assert_eq!(names(&app), "");
    }

    #[test]
    fn digits_and_tab_select_the_kind() {
        let mut app = app();
        press(&mut app, &[Key::Char('4'), Key::Tab]);
        assert_eq!(app.kind, Kind::Front);
        press(&mut app, &[Key::Right, Key::Right, Key::BackTab]);
        assert_eq!(app.kind, Kind::Driver);
    }
}
