//! Parser of the `#syscall` lines.

use super::super::finding::Finding;
use super::super::tree::Tree;

/// Names of the processes that have a list, and their constants in the table.
pub(super) const WHO: [(&str, &str); 8] = [
    ("driver", "DRIVER"),
    ("frontend", "FRONTEND"),
    ("uplink", "UPLINK"),
    ("daemon", "DAEMON"),
    ("disk", "DISK"),
    ("proxy", "PROXY"),
    ("card", "CARD"),
    ("shield", "SHIELD"),
];

/// One system call of one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Row {
    pub(super) path: String,
    pub(super) line: usize,
    /// Bit set of the processes, by their index in [`WHO`].
    pub(super) who: u8,
    pub(super) call: String,
    /// Architecture, if only one has the call.
    pub(super) arch: Option<String>,
    /// Set for a call that is refused on purpose.
    pub(super) refused: bool,
    /// Conditions as Rust expressions, in the order of the line.
    pub(super) when: Vec<String>,
    pub(super) why: String,
}

/// Returns the text after the mark; `None` for other lines.
pub(super) fn payload(line: &str) -> Option<&str> {
    line.trim_start().strip_prefix("// #syscall ").map(str::trim)
}

/// Returns all calls in the product's sources, and a finding for each line that cannot be parsed.
pub(super) fn all(tree: &Tree) -> (Vec<Row>, Vec<Finding>) {
    let (mut rows, mut findings) = (vec![], vec![]);
    let sources = tree.sources.iter().filter(|(path, _)| path.starts_with("crates/"));
    for (path, source) in sources {
        for (i, line) in source.lines.iter().enumerate() {
            let Some(text) = payload(line) else { continue };
            if source.is_test(i + 1) {
                findings.push(Finding::at(path, i + 1, "tests need no `#syscall` lines"));
                continue;
            }
            match read(text) {
                Ok(read) => rows.extend(read.into_iter().map(|row| Row {
                    path: path.clone(),
                    line: i + 1,
                    ..row
                })),
                Err(why) => findings.push(Finding::at(path, i + 1, format!("`#syscall`: {why}"))),
            }
        }
    }
    (rows, findings)
}

/// Parses one line, which may name several calls.
fn read(text: &str) -> Result<Vec<Row>, String> {
    let (head, why) = text.split_once(": ").ok_or("needs `: why` at its end")?;
    let why = why.trim().to_owned();
    if head == "none" {
        return Ok(vec![]);
    }
    let mut words = head.split_whitespace();
    let who = who(words.next().unwrap_or_default())?;
    let calls = words.next().ok_or("names no call")?;
    let when = words.map(condition).collect::<Result<Vec<_>, _>>()?;
    calls
        .split(',')
        .map(|call| {
            let (refused, call) = call.strip_prefix('!').map_or((false, call), |call| (true, call));
            let (call, arch) = match call.split_once('@') {
                Some((call, arch)) => (call, Some(arch.to_owned())),
                None => (call, None),
            };
            let is_name = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_';
            if call.is_empty() || !call.chars().all(is_name) {
                return Err(format!("`{call}` is no name of a call"));
            }
            if refused && !when.is_empty() {
                return Err("what is refused is refused without conditions".to_owned());
            }
            let (when, why, call) = (when.clone(), why.clone(), call.to_owned());
            Ok(Row { path: String::new(), line: 0, who, call, arch, refused, when, why })
        })
        .collect()
}

fn who(text: &str) -> Result<u8, String> {
    if text == "all" {
        return Ok((0..WHO.len()).fold(0, |all, bit| all | 1 << bit));
    }
    text.split(',').try_fold(0, |all, name| {
        let at = WHO.iter().position(|(known, _)| *known == name);
        at.map(|at| all | 1 << at).ok_or_else(|| format!("nobody is called `{name}`"))
    })
}

/// Translates a condition to a Rust expression.
fn condition(text: &str) -> Result<String, String> {
    let unreadable = || format!("`{text}` is no condition");
    let (index, rest) = text.split_at_checked(1).ok_or_else(unreadable)?;
    if !matches!(index, "0" | "1" | "2" | "3" | "4" | "5") {
        return Err(unreadable());
    }
    let (operator, rest) = rest.split_at_checked(1).ok_or_else(unreadable)?;
    match operator {
        "=" if rest == "=0" => Ok(format!("is_whole({index}, 0)")),
        "=" if rest == "pid" => Ok(format!("own_pid({index})")),
        "=" => Ok(format!("is({index}, {})", value(rest)?)),
        "+" => Ok(format!("has({index}, {})", value(rest)?)),
        "-" => Ok(format!("lacks({index}, {})", value(rest)?)),
        "&" => {
            let (mask, is) = rest.split_once('=').ok_or_else(unreadable)?;
            Ok(format!("masked({index}, {}, {})", value(mask)?, value(is)?))
        }
        _ => Err(unreadable()),
    }
}

/// Translates a number or names of libc to a Rust expression of type i32.
fn value(text: &str) -> Result<String, String> {
    let one = |word: &str| {
        let hexadecimal = word.strip_prefix("0x").map(|digits| u32::from_str_radix(digits, 16));
        if let Ok(number) = hexadecimal.unwrap_or_else(|| word.parse()) {
            return Ok(match i32::try_from(number) {
                Ok(number) if number < 10 => number.to_string(),
                Ok(number) => grouped(number.cast_unsigned(), ""),
                Err(_) => format!("{}.cast_signed()", grouped(number, "_u32")),
            });
        }
        let is_name = |c: char| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_';
        if !word.is_empty() && word.chars().all(is_name) {
            Ok(format!("libc::{word}"))
        } else {
            Err(format!("`{word}` is neither a number nor a name of libc"))
        }
    };
    Ok(text.split('|').map(one).collect::<Result<Vec<_>, String>>()?.join(" | "))
}

/// Formats a hexadecimal number in groups of four digits.
fn grouped(number: u32, suffix: &str) -> String {
    let (high, low) = (number >> 16, number & 0xffff);
    if high == 0 { format!("{low:#x}{suffix}") } else { format!("{high:#06x}_{low:04x}{suffix}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn line_is_parsed_to_one_row_a_call() {
        let rows = read("driver,uplink read,poll@x86_64 1=0x5421 2-PROT_EXEC: why: so").unwrap();
        assert_eq!(rows.len(), 2);
        assert_eq!((rows[0].who, &*rows[0].call, rows[0].arch.as_deref()), (0b101, "read", None));
        assert_eq!((&*rows[1].call, rows[1].arch.as_deref()), ("poll", Some("x86_64")));
        assert_eq!(rows[1].when, ["is(1, 0x5421)", "lacks(2, libc::PROT_EXEC)"]);
        assert_eq!(rows[0].why, "why: so");
        assert!(read("all !mremap: tried").unwrap()[0].refused);
        assert_eq!(read("none: before").unwrap(), []);
    }

    #[test]
    fn condition_is_translated_to_rust() {
        for (text, rust) in [
            ("0=AF_INET", "is(0, libc::AF_INET)"),
            ("1&0xf=SOCK_STREAM", "masked(1, 0xf, libc::SOCK_STREAM)"),
            ("0+CLONE_VM|CLONE_THREAD", "has(0, libc::CLONE_VM | libc::CLONE_THREAD)"),
            ("1=0x80081272", "is(1, 0x8008_1272_u32.cast_signed())"),
            ("1=0x00184700", "is(1, 0x0018_4700)"),
            ("0=pid", "own_pid(0)"),
            ("2=0", "is(2, 0)"),
            ("2==0", "is_whole(2, 0)"),
        ] {
            assert_eq!(condition(text).unwrap(), rust);
        }
    }

    #[test]
    fn malformed_line_is_an_error() {
        for (text, part) in [
            ("all read", "why"),
            ("all read:", "why"),
            ("nobody read: x", "nobody"),
            ("all: x", "no call"),
            ("all Read: x", "no name"),
            ("all read 7=1: x", "no condition"),
            ("all read 1~1: x", "no condition"),
            ("all read 1==1: x", "neither"),
            ("all read 1=f(x): x", "neither"),
            ("all !read 1=1: x", "refused"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
