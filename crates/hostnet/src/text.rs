//! Texts for a terminal: lines of processes that may be compromised, numbers of bytes, and counters.

use std::collections::BTreeMap;

/// Returns the last line of a stderr tail, safe for a message.
pub fn last_line(tail: &str) -> Option<String> {
    tail.lines().rev().map(str::trim).find(|line| !line.is_empty()).map(printable)
}

/// Formats a reason as ": WHY", or returns an empty text.
pub fn because(why: Option<&str>) -> String {
    why.map_or_else(String::new, |why| format!(": {why}"))
}

/// Replaces control characters, which could act on a terminal, and those that change the direction of text: the process may
/// be compromised.
pub fn printable(text: &str) -> String {
    text.chars().map(|c| if acts(c) { '\u{fffd}' } else { c }).take(500).collect()
}

/// Returns `true` for a character that acts on a terminal, or on the order of other characters (Unicode's annex 9).
fn acts(c: char) -> bool {
    let reorders = matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    c.is_control() || reorders
}

/// Replaces the control characters of a text of several lines, except its line breaks.
pub fn printable_lines(text: &str) -> String {
    text.chars().map(|c| if acts(c) && c != '\n' { '\u{fffd}' } else { c }).collect()
}

/// Formats counters for a line.
pub fn listed(counts: &BTreeMap<String, u64>) -> String {
    let pairs: Vec<_> = counts.iter().map(|(name, count)| format!("{name} {count}")).collect();
    pairs.join(", ")
}

/// Formats a number of bytes for a column.
pub fn byte_count(count: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let steps = UNITS.len() - 1;
    let unit = (0..steps).find(|unit| count >> (10 * unit) < 10_000).unwrap_or(steps);
    format!("{} {}", count >> (10 * unit), UNITS[unit])
}

/// Divides a text at its blanks into lines of at most `columns` characters; a longer word has a line of its own. Each line
/// but the first begins with `indent`.
pub fn wrapped(text: &str, columns: usize, indent: &str) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split(' ') {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= columns => {
                line.push(' ');
                line.push_str(word);
            }
            Some(_) => lines.push(format!("{indent}{word}")),
            None => lines.push(word.to_owned()),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_of_stderr_tail_are_replaced() {
        assert_eq!(last_line("a\n\x1b[2Jb\n\n"), Some("\u{fffd}[2Jb".into()));
        assert_eq!(last_line(" \n"), None);
        assert_eq!(printable_lines("a\u{9b}2J\nb\u{7f}\r"), "a\u{fffd}2J\nb\u{fffd}\u{fffd}");
    }

    #[test]
    fn characters_that_change_the_direction_of_text_are_replaced() {
        assert_eq!(printable("a\u{202e}b\u{2066}c\u{200f}"), "a\u{fffd}b\u{fffd}c\u{fffd}");
        assert_eq!(printable("עברית é"), "עברית é");
    }

    #[test]
    fn text_is_divided_at_blanks() {
        assert_eq!(wrapped("a  b", 4, ""), ["a  b"]);
        assert_eq!(wrapped("one two three", 7, "  "), ["one two", "  three"]);
        assert_eq!(wrapped("one longer-than-that b", 5, " "), ["one", " longer-than-that", " b"]);
    }

    #[test]
    fn byte_count_fits_a_column() {
        let cases = [
            (0, "0 B"),
            (9_999, "9999 B"),
            (10_000, "9 KiB"),
            (10_239_999, "9999 KiB"),
            (u64::MAX, "16777215 TiB"),
        ];
        for (count, text) in cases {
            assert_eq!(byte_count(count), text);
        }
    }
}
