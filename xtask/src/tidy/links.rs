//! Rule about links in Markdown: a relative link leads to a file, its anchor to a heading, and the index of `docs` has
//! every page.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::finding::Finding;
use super::tree::Tree;
use crate::markdown;

/// Index of the directory `docs`.
const INDEX: &str = "docs/README.md";

/// Returns findings for links that lead to no file or heading, and for pages that the index lacks.
pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = vec![];
    let mut indexed = BTreeSet::new();
    let pages: BTreeMap<&Path, BTreeSet<String>> = tree
        .files
        .iter()
        .filter(|(path, _)| is_page(path))
        .map(|(path, text)| (Path::new(path), markdown::anchors(text)))
        .collect();
    for (path, text) in tree.files.iter().filter(|(path, _)| is_page(path)) {
        for (i, line) in markdown::prose(text) {
            for link in markdown::links(line) {
                let (file, anchor) = link.parts();
                let target = markdown::resolve(path, file);
                let why = if !tree.files.keys().any(|file| Path::new(file).starts_with(&target)) {
                    Some("file")
                } else {
                    let anchors = anchor.zip(pages.get(target.as_path()));
                    let is_missing = anchors.is_some_and(|(anchor, all)| !all.contains(anchor));
                    is_missing.then_some("heading")
                };
                if let Some(what) = why {
                    let message = format!("`{}` leads to no {what}", link.target);
                    findings.push(Finding::at(path, i + 1, message));
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn link_without_file_or_heading_and_page_without_link_are_findings() {
        let readme = "# Here\n[a](docs/a.md#part) [crates](crates/) [far](https://x.example/y) [here](#here)\n";
        let index = ("docs/README.md", "[a](a.md)\n[up](../README.md)\n");
        let sources = ("crates/lib.rs", "");
        let page = ("docs/a.md", "## Part\n");
        let tree = Tree::from_files([("README.md", readme), index, sources, page]);
        assert_eq!(check(&tree), []);
        let broken = ("docs/a.md", "## Part\n[gone](b.md) [above](../../README.md)\n");
        let found = check(&Tree::from_files([("README.md", readme), index, sources, broken]));
        let found: Vec<String> = found.iter().map(ToString::to_string).collect();
        assert_eq!(found.len(), 2, "{found:?}");
        assert!(found.iter().all(|finding| finding.starts_with("docs/a.md:2: ")), "{found:?}");
        let page_without_heading = ("docs/a.md", "# Parts\n");
        let found =
            check(&Tree::from_files([("README.md", readme), index, sources, page_without_heading]));
        let found: Vec<String> = found.iter().map(ToString::to_string).collect();
        assert_eq!(found, ["README.md:2: `docs/a.md#part` leads to no heading"]);
        let tree = [("README.md", readme), index, sources, page, ("docs/perf/log.md", "")];
        let found = check(&Tree::from_files(tree));
        assert!(matches!(&found[..], [one] if one.to_string().starts_with("docs/perf/log.md: ")));
    }
}
