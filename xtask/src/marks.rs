//! Marks of long tests in the sources: `#[ignore = "long: REASON"]`. libtest leaves such a test out, and the long set runs it
//! by its name. Other ignored tests are processes that a test starts; no set runs them alone.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use walkdir::WalkDir;

use crate::packages::crates;

/// Start of the attribute.
const MARK: &str = "#[ignore = \"long: ";

/// Names of long tests by program: the name of the package's folder, and `None` for its sources or the name of an
/// integration test.
pub(crate) type Marks = BTreeMap<(String, Option<String>), Vec<String>>;

/// Collects the marks of all packages.
pub(crate) fn find(root: &Path) -> anyhow::Result<Marks> {
    let mut marks = Marks::new();
    for krate in crates(root)?.into_iter().chain([root.join("xtask")]) {
        let name = krate.file_name().context("a package's folder has a name")?;
        let name = name.to_string_lossy().into_owned();
        for (folder, is_integration) in [("src", false), ("tests", true)] {
            let folder = krate.join(folder);
            for file in sources(&folder) {
                let target = is_integration.then(|| target_of(file.strip_prefix(&folder).ok()));
                let found = names(&std::fs::read_to_string(&file)?);
                if !found.is_empty() {
                    marks.entry((name.clone(), target.flatten())).or_default().extend(found);
                }
            }
        }
    }
    Ok(marks)
}

fn sources(folder: &Path) -> impl Iterator<Item = PathBuf> {
    let files = WalkDir::new(folder).sort_by_file_name().into_iter().filter_map(Result::ok);
    files
        .map(walkdir::DirEntry::into_path)
        .filter(|path| path.extension().is_some_and(|e| e == "rs"))
}

/// Returns the integration test of a file, relative to `tests`.
fn target_of(file: Option<&Path>) -> Option<String> {
    let first = Path::new(file?.components().next()?.as_os_str());
    Some(first.file_stem()?.to_string_lossy().into_owned())
}

/// Returns the functions that follow a mark.
fn names(text: &str) -> Vec<String> {
    // A mark is at the start of its line: elsewhere it is part of a comment.
    let starts = text.match_indices(MARK).map(|(at, _)| at);
    let starts = starts
        .filter(|at| text[..*at].rsplit('\n').next().is_some_and(|line| line.trim().is_empty()));
    let after: Vec<&str> = starts.map(|at| &text[at..]).collect();
    let end = |c: char| !c.is_alphanumeric() && c != '_';
    let name = |rest: &str| {
        // A list of tests that a macro makes has `name: ARGUMENTS`.
        let next = rest.split_once('\n')?.1.trim_start();
        let word = next.split(end).next()?;
        let of_list = !word.is_empty() && next[word.len()..].starts_with(": ");
        let name = if of_list { next } else { rest.split_once("fn ")?.1 };
        Some(name.split(end).next()?.to_owned())
    };
    after.into_iter().filter_map(name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_marks() {
        let text = format!(
            "//! {MARK}...\"]\n#[test]\n{MARK}a minute\"]\nfn one() {{}}\n#[test]\n#[ignore = \"the child of one\"]\nfn two() {{}}\n\
             #[test]\n{MARK}two\"]\n// Comment\npub(crate) fn three_4() {{}}\n\
             list! {{\n    {MARK}x\"]\n    four: \"page\",\n}}\nfn five() {{}}\n"
        );
        assert_eq!(names(&text), ["one", "three_4", "four"]);
    }

    #[test]
    fn file_of_folder_belongs_to_the_program_of_the_folder() {
        assert_eq!(target_of(Some(Path::new("vif.rs"))).as_deref(), Some("vif"));
        assert_eq!(target_of(Some(Path::new("network/ports.rs"))).as_deref(), Some("network"));
    }
}
