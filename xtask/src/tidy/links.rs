//! Rule about links in Markdown: a relative link leads to a file, and the index of `docs` has every page.

use std::collections::BTreeSet;
use std::path::{Component, Path, PathBuf};

use super::finding::Finding;
use super::tree::Tree;

/// Index of the directory `docs`.
const INDEX: &str = "docs/README.md";

/// Returns findings for links that lead to no file, and for pages that the index lacks.
pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = vec![];
    let mut indexed = BTreeSet::new();
    for (path, text) in tree.files.iter().filter(|(path, _)| is_page(path)) {
        for (i, line) in text.lines().enumerate() {
            for link in links(line) {
                let target = resolve(path, link);
                if !tree.files.keys().any(|file| Path::new(file).starts_with(&target)) {
                    findings.push(Finding::at(path, i + 1, format!("`{link}` leads to no file")));
                }
                if path == INDEX {
                    indexed.insert(target);
                }
            }
        }
    }
    let pages = tree.files.keys().filter(|path| path.starts_with("docs/") && is_page(path));
    for page in pages.filter(|page| *page != INDEX && !indexed.contains(Path::new(page))) {
        findings.push(Finding::file(page, format!("{INDEX} has no link to this page")));
    }
    findings
}

fn is_page(path: &str) -> bool {
    Path::new(path).extension().is_some_and(|extension| extension == "md")
}

/// Iterates over the relative links of a line, without their anchors.
fn links(line: &str) -> impl Iterator<Item = &str> {
    let targets = line.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    let files = targets.filter_map(|target| target.split('#').next());
    files.filter(|file| !file.is_empty() && !file.contains("://") && !file.contains(' '))
}

/// Returns the path from the root to which a link of a page leads.
fn resolve(page: &str, link: &str) -> PathBuf {
    let mut path = Path::new(page).parent().unwrap_or(Path::new("")).to_owned();
    for component in Path::new(link).components() {
        match component {
            Component::ParentDir if path.pop() => {}
            Component::CurDir => {}
            other => path.push(other),
        }
    }
    path
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn link_without_file_and_page_without_link_are_findings() {
        let readme =
            "[a](docs/a.md#part) [crates](crates/) [far](https://x.example/y) [here](#here)\n";
        let index = ("docs/README.md", "[a](a.md)\n[up](../README.md)\n");
        let sources = ("crates/lib.rs", "");
        let page = ("docs/a.md", "");
        let tree = Tree::from_files([("README.md", readme), index, sources, page]);
        assert_eq!(check(&tree), []);
        let broken = ("docs/a.md", "fine\n[gone](b.md) [above](../../README.md)\n");
        let found = check(&Tree::from_files([("README.md", readme), index, sources, broken]));
        let found: Vec<String> = found.iter().map(ToString::to_string).collect();
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found.iter().all(|finding| finding.starts_with("docs/a.md:2: ")), "{found:?}");
        let tree = [("README.md", readme), index, sources, page, ("docs/perf/log.md", "")];
        let found = check(&Tree::from_files(tree));
        assert!(matches!(&found[..], [one] if one.to_string().starts_with("docs/perf/log.md: ")));
    }
}
