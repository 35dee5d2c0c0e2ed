//! Rule about columns: lines of C are as long as the projects allow in which the files are meant to be read.
//!
//! A tab ends at the next multiple of [`TAB`] columns. In a patch, the lines that it adds count, without their mark.
//!
//! A line of Linux may be longer if a string begins within the limit and takes the rest of it: the kernel's coding
//! style keeps messages whole, so that they can be searched for.

use super::finding::Finding;
use super::tree::Tree;

/// Directories with C sources and their maximum number of columns: those of Linux and of Xen.
const LIMITS: [(&str, usize); 2] = [("linux/", 100), ("xen/", 80)];

/// Columns of a tab.
const TAB: usize = 8;

/// Returns findings for lines of C over the limit of their directory.
pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = vec![];
    for (path, text) in &tree.files {
        let limit = LIMITS.iter().find(|(folder, _)| path.starts_with(folder));
        let Some((folder, limit)) = limit else { continue };
        for (i, line) in text.lines().enumerate() {
            let Some(line) = source_of(path, line) else { continue };
            let columns = columns(line);
            let is_kept_whole = *folder == "linux/" && ends_in_string(line, *limit);
            if columns > *limit && !is_kept_whole {
                let message = format!("{columns} columns, the limit of {folder} is {limit}");
                findings.push(Finding::at(path, i + 1, message));
            }
        }
    }
    findings
}

/// Returns the line of C in a line of a file: the line itself, or what a patch adds.
fn source_of<'a>(path: &str, line: &'a str) -> Option<&'a str> {
    match path.rsplit_once('.')?.1 {
        "c" | "h" => Some(line),
        "patch" => line.strip_prefix('+').filter(|added| !added.starts_with("++ ")),
        _ => None,
    }
}

/// Returns `true` if a string begins within the limit, and only it and punctuation stand beyond.
fn ends_in_string(line: &str, limit: usize) -> bool {
    let Some(code) = line.split('"').next().filter(|code| code.len() < line.len()) else {
        return false;
    };
    let last = line.rsplit('"').next().unwrap_or_default();
    let punctuation = last.chars().all(|c| matches!(c, ')' | ',' | ';' | ' ' | '\\' | '\t'));
    columns(code) < limit && line.matches('"').count() == 2 && punctuation
}

/// Returns the number of columns of a line.
fn columns(line: &str) -> usize {
    line.chars().fold(0, |at, c| if c == '\t' { (at / TAB + 1) * TAB } else { at + 1 })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(path: &str, line: &str) -> Vec<String> {
        let text = format!("/* first */\n{line}\n");
        check(&Tree::from_files([(path, &*text)])).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn line_of_linux_has_at_most_100_columns_and_of_xen_80() {
        for (path, limit) in [("linux/a/a.c", 100), ("xen/common/a.c", 80), ("xen/include/a.h", 80)]
        {
            assert_eq!(findings(path, &"x".repeat(limit)), [] as [&str; 0]);
            let found = findings(path, &"x".repeat(limit + 1));
            assert_eq!(found.len(), 1);
            let expected = format!("{path}:2: {} columns, the limit", limit + 1);
            assert!(found[0].starts_with(&expected), "{found:?}");
        }
        assert_eq!(findings("vm/a.c", &"x".repeat(200)), [] as [&str; 0]);
        assert_eq!(findings("linux/README.md", &"x".repeat(200)), [] as [&str; 0]);
    }

    #[test]
    fn message_of_linux_stays_whole_and_code_behind_it_does_not() {
        let message = "y".repeat(90);
        for kept in [format!("\tpr_info(\"{message}\\n\",\n"), format!("\t\t\"{message}\");")] {
            assert_eq!(findings("linux/a.c", kept.trim_end()), [] as [&str; 0], "{kept}");
        }
        assert_eq!(findings("linux/a.c", &format!("\tpr_info(\"{message}\", a, b);")).len(), 1);
        assert_eq!(findings("xen/a.c", &format!("\tprintk(\"{message}\",")).len(), 1);
    }

    #[test]
    fn tab_ends_at_the_next_multiple_of_eight() {
        assert_eq!(columns("\tx"), 9);
        assert_eq!(columns("1234567\tx"), 9);
        assert_eq!(columns("12345678\tx"), 17);
        assert_eq!(findings("xen/a.c", &format!("\t\t{}", "x".repeat(64))), [] as [&str; 0]);
        assert_eq!(findings("xen/a.c", &format!("\t\t{}", "x".repeat(65))).len(), 1);
    }

    #[test]
    fn line_that_a_patch_adds_is_measured_without_its_mark() {
        let line = "x".repeat(80);
        for kept in
            [format!("+{line}"), format!(" {line}xx"), format!("-{line}xx"), format!("+++ {line}")]
        {
            assert_eq!(findings("xen/patches/4.17/a.patch", &kept), [] as [&str; 0], "{kept}");
        }
        assert_eq!(findings("xen/patches/4.17/a.patch", &format!("+{line}x")).len(), 1);
    }
}
