//! Parser of the OpenMetrics text format, for tests.

use std::collections::{BTreeMap, BTreeSet};

/// Values of samples by name and labels.
pub type Samples = BTreeMap<String, f64>;

/// Parses a text by the OpenMetrics specification (1.0, section "Text Format"). Refuses a text that
/// breaks it.
///
/// # Errors
///
/// Returns the line and the rule that it breaks.
pub fn read(text: &str) -> Result<Samples, String> {
    let body = text.strip_suffix("# EOF\n").ok_or("no `# EOF` at the end")?;
    let (mut samples, mut done) = (Samples::new(), BTreeSet::new());
    let (mut current, mut kind) = (String::new(), "");
    for line in body.lines() {
        if let Some(about) = line.strip_prefix("# ") {
            let mut words = about.splitn(3, ' ');
            let (what, name) = (words.next().unwrap_or(""), words.next().ok_or("no name")?);
            let value = words.next().ok_or("nothing said")?;
            check_name(name)?;
            if name != current {
                if !done.insert(name.to_owned()) {
                    return Err(format!("{name} comes in two places"));
                }
                (current, kind) = (name.to_owned(), "unknown");
            }
            match what {
                "TYPE" if ["counter", "gauge"].contains(&value) => kind = value,
                "HELP" if !value.is_empty() => {}
                "UNIT" if name.ends_with(&format!("_{value}")) => {}
                _ => return Err(format!("{line} means nothing")),
            }
            continue;
        }
        let (series, value) = line.rsplit_once(' ').ok_or("no value")?;
        let (name, labels) = series.split_once('{').unwrap_or((series, "}"));
        let family = match kind {
            "counter" => name.strip_suffix("_total").ok_or(format!("{name} lacks _total"))?,
            "gauge" => name,
            _ => return Err(format!("{name} has no type")),
        };
        if family != current {
            return Err(format!("{name} stands under {current}"));
        }
        check_labels(labels)?;
        let value: f64 = value.parse().map_err(|_| format!("{value} is no number"))?;
        if samples.insert(series.to_owned(), value).is_some() {
            return Err(format!("{series} comes twice"));
        }
    }
    Ok(samples)
}

fn check_name(name: &str) -> Result<(), String> {
    let first = name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
    let all = name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    if first && all { Ok(()) } else { Err(format!("{name} is no name")) }
}

/// `a="b",c="d"}`, with `\\`, `\"` and `\n` as the only escapes.
fn check_labels(mut text: &str) -> Result<(), String> {
    let mut names = BTreeSet::new();
    while text != "}" {
        let (name, rest) = text.split_once("=\"").ok_or("no value of a label")?;
        check_name(name)?;
        if !names.insert(name) {
            return Err(format!("{name} twice"));
        }
        let mut chars = rest.char_indices();
        let end = loop {
            match chars.next().ok_or("a label without an end")? {
                (_, '\\') => match chars.next() {
                    Some((_, '\\' | '"' | 'n')) => {}
                    other => return Err(format!("escape {other:?}")),
                },
                (_, '\n') => return Err("a line's end in a label".to_owned()),
                (at, '"') => break at,
                _ => {}
            }
        };
        text = &rest[end + 1..];
        text = text.strip_prefix(',').unwrap_or(text);
    }
    Ok(())
}
