//! Search for the tests of subcommands: a subcommand has one if a line of a test starts it by literal words
//! (`"policy", "check"`, or `ringfence policy check` in a script), or a page does in a block that runs.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Returns the subcommands of a command, as words: of those with subcommands of their own, only these.
pub fn leaves(command: &clap::Command) -> Vec<Vec<String>> {
    let subs =
        command.get_subcommands().filter(|sub| !sub.is_hide_set() && sub.get_name() != "help");
    let mut found = Vec::new();
    for sub in subs {
        let below = leaves(sub);
        let below = if below.is_empty() { vec![vec![]] } else { below };
        let name = || sub.get_name().to_owned();
        found.extend(below.into_iter().map(|rest| [vec![name()], rest].concat()));
    }
    found
}

/// Returns the subcommands that no test starts, as the words of a command line. `program` is the name of the program,
/// and `texts` are the sources of its tests and the pages.
pub fn untested(program: &str, command: &clap::Command, texts: &[String]) -> BTreeSet<String> {
    let is_tested = |path: &Vec<String>| {
        texts.iter().flat_map(|text| text.lines()).any(|line| {
            let literals = path.iter().map(|word| format!("\"{word}\""));
            has_in_order(line, literals) || starts(line, program, path)
        })
    };
    let missing = leaves(command).into_iter().filter(|path| !is_tested(path));
    missing.map(|path| path.join(" ")).collect()
}

/// Returns `true` if the line has all the texts, one behind the other.
fn has_in_order(line: &str, texts: impl IntoIterator<Item = String>) -> bool {
    let mut rest = Some(line);
    for text in texts {
        rest = rest.and_then(|rest| rest.split_once(&text)).map(|(_, behind)| behind);
    }
    rest.is_some()
}

/// Returns `true` if the line starts the subcommand. Between its words may be others: `ringfence port web add`.
fn starts(line: &str, program: &str, path: &[String]) -> bool {
    line.match_indices(&format!("{program} ")).any(|(at, found)| {
        let is_end = |c: char| !(c.is_ascii_alphanumeric() || c == '-');
        let mut words = line[at + found.len()..].split(is_end);
        words.next() == path.first().map(String::as_str)
            && path[1..].iter().all(|word| words.any(|other| other == word))
    })
}

/// Reads the sources of tests below a directory, without comments, and without the file whose path ends with `except`.
///
/// # Errors
///
/// Returns the error of a directory or file that cannot be read.
pub fn sources(directory: &Path, except: Option<&str>) -> io::Result<Vec<String>> {
    let mut texts = Vec::new();
    let mut directories = vec![directory.to_owned()];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(directory)? {
            let path: PathBuf = entry?.path();
            if path.is_dir() {
                directories.push(path);
            } else if path.extension().is_some_and(|ending| ending == "rs")
                && !except.is_some_and(|except| path.ends_with(except))
            {
                let text = fs::read_to_string(path)?;
                let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
                texts.push(code.collect::<Vec<_>>().join("\n"));
            }
        }
    }
    Ok(texts)
}
