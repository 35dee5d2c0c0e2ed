//! Check of the site: each link leads to a file of it, and each anchor to an element of that file.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use walkdir::WalkDir;

use crate::markdown;

/// Pages that mdBook makes of its own, for other addresses than their own.
const LEFT_OUT: [&str; 3] = ["404.html", "print.html", "toc.html"];

/// Returns one line for each link of the site that leads nowhere.
pub(super) fn broken_links(site: &Path) -> anyhow::Result<Vec<String>> {
    let mut pages: BTreeMap<PathBuf, String> = BTreeMap::new();
    for entry in WalkDir::new(site) {
        let entry = entry?;
        let path = entry.path().strip_prefix(site)?.to_owned();
        let is_left_out = LEFT_OUT.iter().any(|name| path == Path::new(name));
        if path.extension().is_some_and(|ending| ending == "html") && !is_left_out {
            pages.insert(path, std::fs::read_to_string(entry.path())?);
        }
    }
    let ids: BTreeMap<&Path, BTreeSet<&str>> = pages
        .iter()
        .map(|(path, html)| (path.as_path(), attributes(html, "id").collect()))
        .collect();
    let mut broken = vec![];
    for (path, html) in &pages {
        for link in attributes(html, "href").chain(attributes(html, "src")) {
            let is_far = link.contains(':') || link.starts_with("//");
            if link.is_empty() || is_far {
                continue;
            }
            let (file, anchor) = link.split_once('#').map_or((link, ""), |(file, a)| (file, a));
            let target = markdown::resolve(&path.to_string_lossy(), file);
            let has_anchor = anchor.is_empty()
                || ids.get(target.as_path()).is_none_or(|ids| ids.contains(anchor));
            if !(site.join(&target).exists() && has_anchor) {
                broken.push(format!("{}: the link {link} leads nowhere", path.display()));
            }
        }
    }
    Ok(broken)
}

/// Iterates over the values of an attribute in a page.
fn attributes<'a>(html: &'a str, name: &str) -> impl Iterator<Item = &'a str> {
    let start = format!(" {name}=\"");
    let starts: Vec<usize> =
        html.match_indices(&start).map(|(at, found)| at + found.len()).collect();
    starts.into_iter().filter_map(|start| Some(html[start..].split_once('"')?.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn link_without_file_or_element_is_broken() {
        let site = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            super::super::write(&site.path().join(path), text.as_bytes()).unwrap();
        };
        write(
            "index.html",
            "<a href=\"a/b.html#here\"> <a href=\"https://x.example\"> <img src=\"p.svg\">",
        );
        write("a/b.html", "<h2 id=\"here\"> <a href=\"../index.html\"> <a href=\"#here\">");
        write("p.svg", "");
        assert_eq!(broken_links(site.path()).unwrap(), [""; 0]);
        write("a/b.html", "<a href=\"gone.html\"> <a href=\"#gone\">");
        assert_eq!(
            broken_links(site.path()).unwrap(),
            [
                "a/b.html: the link gone.html leads nowhere",
                "a/b.html: the link #gone leads nowhere",
                "index.html: the link a/b.html#here leads nowhere"
            ]
        );
    }
}
