//! JSON texts that are safe on a terminal.

use std::fmt::Write as _;

/// Escapes the control characters in a JSON text that JSON itself leaves as they are: U+007F and U+0080 to U+009F
/// (RFC 8259, section 7). Terminals act on the latter as on escape sequences. Line breaks between values stay; in a
/// string, JSON has escaped them.
#[must_use]
pub fn escape_controls(json: String) -> String {
    let is_raw = |c: char| c.is_control() && c != '\n';
    if !json.contains(is_raw) {
        return json;
    }
    let mut escaped = String::with_capacity(json.len() + 16);
    for c in json.chars() {
        if is_raw(c) {
            // Writing to a `String` never fails.
            let _ = write!(escaped, "\\u{:04x}", u32::from(c));
        } else {
            escaped.push(c);
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_beyond_ascii_are_escaped_and_all_others_stay() {
        let json = "{\n  \"a\": \"\u{9b}2J\u{7f}\u{80}\u{9f}\u{a0}é\\n\"\n}".to_owned();
        let escaped = "{\n  \"a\": \"\\u009b2J\\u007f\\u0080\\u009f\u{a0}é\\n\"\n}";
        assert_eq!(escape_controls(json), escaped);
        assert_eq!(escape_controls(escaped.to_owned()), escaped);
    }
}
