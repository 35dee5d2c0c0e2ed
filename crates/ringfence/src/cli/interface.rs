//! Names of network interfaces on the command line.

use ringfence_sys::tap;

/// Validates the name of a network interface.
///
/// # Errors
///
/// Returns a text with the rule that the name breaks.
pub fn parse_interface(text: &str) -> Result<String, String> {
    let valid = (1..=tap::NAME_MAX).contains(&text.len())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
        && !matches!(text, "." | "..");
    if valid {
        Ok(text.to_owned())
    } else {
        Err(format!(
            "an interface's name has 1 to {} letters, digits, `-`, `_`, `.`",
            tap::NAME_MAX
        ))
    }
}
