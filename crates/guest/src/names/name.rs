//! Names of guests and of switches.

/// Domain under which every name can be queried, besides its switch's.
pub const DOMAIN: &str = "ringfence";

/// Maximum length of a name in bytes (a label: RFC 1035, section 2.3.4).
pub const NAME_MAX: usize = 63;

/// Reasons for which a text cannot be a guest's name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// The text is empty or too long.
    #[error("a name has 1 to {NAME_MAX} characters; this has {0}")]
    Length(usize),
    /// A character is not a letter, digit or hyphen.
    #[error("`{0}` is not allowed in a name: letters, digits and `-` are")]
    Character(char),
    /// The first or last character is a hyphen.
    #[error("a name starts and ends with a letter or digit")]
    Hyphen,
    /// The name is reserved.
    #[error("`{0}` has a meaning of its own; take another name")]
    Reserved(String),
}

/// Validates a guest's name and converts it to lower case. A name is one label of letters, digits
/// and hyphens, as host names are (RFC 1123, section 2.1).
///
/// # Errors
///
/// Returns [`NameError`] if it is not.
pub fn parse_name(text: &str) -> Result<String, NameError> {
    if !(1..=NAME_MAX).contains(&text.len()) {
        return Err(NameError::Length(text.chars().count()));
    }
    if let Some(other) = text.chars().find(|c| !c.is_ascii_alphanumeric() && *c != '-') {
        return Err(NameError::Character(other));
    }
    if text.starts_with('-') || text.ends_with('-') {
        return Err(NameError::Hyphen);
    }
    let name = text.to_ascii_lowercase();
    let is_number = name.bytes().all(|b| b.is_ascii_digit());
    if name == "localhost" || name == DOMAIN || is_number {
        return Err(NameError::Reserved(name));
    }
    Ok(name)
}

/// Maximum length of a switch's name in bytes. The name is part of a file name and of its guests'
/// names.
pub const SWITCH_NAME_MAX: usize = 32;

/// Error of a text that cannot be a switch's name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "`{0}` cannot name a switch: 1 to {SWITCH_NAME_MAX} of the letters a to z, digits, `-` and `_`, \
     of which the first is a letter or digit"
)]
pub struct SwitchNameError(pub String);

/// Validates the name of a switch.
///
/// # Errors
///
/// Returns [`SwitchNameError`] if it is malformed.
pub fn parse_switch_name(text: &str) -> Result<String, SwitchNameError> {
    let valid = (1..=SWITCH_NAME_MAX).contains(&text.len())
        && text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_'));
    if valid { Ok(text.to_owned()) } else { Err(SwitchNameError(text.to_owned())) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn switch_name_unsafe_in_a_file_name_is_rejected() {
        assert_eq!(parse_switch_name("Lab_1-a").unwrap(), "Lab_1-a");
        for text in ["", "../x", "a/b", ".a", "-a", "a b", "a.b", "é", &"a".repeat(33)] {
            assert!(parse_switch_name(text).is_err(), "{text}");
        }
    }

    #[test]
    fn name_that_is_no_host_label_is_rejected() {
        assert_eq!(parse_name("Web-1").unwrap(), "web-1");
        assert_eq!(parse_name(""), Err(NameError::Length(0)));
        assert_eq!(parse_name(&"a".repeat(64)), Err(NameError::Length(64)));
        assert_eq!(parse_name("a.b"), Err(NameError::Character('.')));
        assert_eq!(parse_name("a_b"), Err(NameError::Character('_')));
        assert_eq!(parse_name("-a"), Err(NameError::Hyphen));
        assert_eq!(parse_name("LOCALHOST"), Err(NameError::Reserved("localhost".into())));
        // The C library parses a number as an address.
        assert_eq!(parse_name("127"), Err(NameError::Reserved("127".into())));
    }
}
