//! Pages of the book: those of `docs`, and those of the source tree to which they lead.
//!
//! A page keeps its place below `docs`; the others are in the folder `source`. Links are rewritten for these places. A link
//! to a folder of the source tree has no page: its text remains.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::Path;

use anyhow::Context as _;
use walkdir::WalkDir;

use crate::markdown::{self, Link};

/// Index of `docs`, whose sections are the parts of the book.
const INDEX: &str = "docs/README.md";
/// First page of the site.
const START: &str = "docs/start.md";

/// Pages and other files of the book, by their paths relative to the root of the repository.
pub(super) struct Pages {
    pages: BTreeMap<String, String>,
    assets: BTreeSet<String>,
    parts: Vec<Part>,
}

/// Part of the book, with its pages in the order of the index.
struct Part {
    title: String,
    pages: Vec<String>,
}

impl Pages {
    /// Reads the pages of `docs` in the repository at `root`, and all those that they lead to.
    ///
    /// # Errors
    ///
    /// Returns an error for a link that leads to no file, and for a page of `docs` that the index lacks.
    pub(super) fn collect(root: &Path) -> anyhow::Result<Pages> {
        let read =
            |path: &str| std::fs::read_to_string(root.join(path)).with_context(|| path.to_owned());
        let parts = parts(&read(INDEX)?);
        let mut found = Pages { pages: BTreeMap::new(), assets: BTreeSet::new(), parts };
        let mut waiting = VecDeque::from([START.to_owned(), INDEX.to_owned()]);
        waiting.extend(found.parts.iter().flat_map(|part| part.pages.clone()));
        while let Some(path) = waiting.pop_front() {
            if found.pages.contains_key(&path) {
                continue;
            }
            let text = read(&path)?;
            for target in markdown::prose(&text).flat_map(|(_, line)| markdown::links(line)) {
                let target = resolve(&path, &target);
                let file = root.join(&target);
                anyhow::ensure!(file.exists(), "{path}: the link to {target} leads to no file");
                if is_page(&target) {
                    waiting.push_back(target);
                } else if file.is_file() {
                    found.assets.insert(target);
                }
            }
            found.pages.insert(path, text);
        }
        for page in WalkDir::new(root.join("docs")) {
            let page = page?;
            let path = page.path().strip_prefix(root)?.to_string_lossy();
            let is_listed = found.pages.contains_key(&*path);
            anyhow::ensure!(is_listed || !is_page(&path), "{INDEX} has no link to {path}");
        }
        found.add_source_tree();
        Ok(found)
    }

    /// Files that the pages show or lead to, pictures for instance.
    pub(super) fn assets(&self) -> impl Iterator<Item = &str> {
        self.assets.iter().map(String::as_str)
    }

    /// Returns the text of each file of the book, by its place, with the manual pages and the list of all pages.
    pub(super) fn sources(&self, manual: &BTreeMap<String, String>) -> BTreeMap<String, String> {
        let mut sources: BTreeMap<String, String> = self
            .pages
            .iter()
            .map(|(path, text)| {
                let rewritten = self.relinked(path, text, path);
                let is_start = path == START;
                (
                    place(path),
                    if is_start { self.with_sections(text, &rewritten) } else { rewritten },
                )
            })
            .collect();
        for (name, text) in manual {
            sources.insert(manual_place(name), text.clone());
        }
        sources.insert("SUMMARY.md".to_owned(), self.summary(manual));
        sources
    }

    /// Adds the pages that no section of the index names as a last part.
    fn add_source_tree(&mut self) {
        let listed: BTreeSet<&String> = self.parts.iter().flat_map(|part| &part.pages).collect();
        let others = self
            .pages
            .keys()
            .filter(|path| !(listed.contains(path) || *path == START || *path == INDEX));
        let pages = others.cloned().collect();
        self.parts.push(Part { title: "Source tree".to_owned(), pages });
    }

    /// Returns mdBook's list of pages.
    fn summary(&self, manual: &BTreeMap<String, String>) -> String {
        let title = |path: &str| {
            let title = self.pages.get(path).and_then(|text| markdown::title(text));
            title.unwrap_or(path).to_owned()
        };
        let mut text = format!("# Summary\n\n[{}]({})\n", title(START), place(START));
        text += &format!("[All pages]({})\n", place(INDEX));
        let (source, guides) = self.parts.split_last().expect("the source tree is a part");
        let list = |part: &Part| {
            let rows = part.pages.iter();
            let rows = rows.map(|path| format!("- [{}]({})\n", title(path), place(path)));
            format!("\n# {}\n\n{}", part.title, rows.collect::<String>())
        };
        text.extend(guides.iter().map(list));
        text += "\n# Manual pages\n\n";
        text.extend(manual.keys().map(|name| format!("- [{name}(1)]({})\n", manual_place(name))));
        text + &list(source)
    }

    /// Replaces each line of the start page that is only a link to a section of another page by that section.
    fn with_sections(&self, text: &str, rewritten: &str) -> String {
        let lines = text.lines().zip(rewritten.lines());
        lines
            .map(|(line, new)| self.section_of(line).unwrap_or_else(|| new.to_owned()) + "\n")
            .collect()
    }

    /// Returns the section to which a line of the start page leads, if it has nothing but that link.
    fn section_of(&self, line: &str) -> Option<String> {
        let mut links = markdown::links(line);
        let (link, None) = (links.next()?, links.next()) else { return None };
        let is_whole = line.starts_with('[') && link.start + link.target.len() + 1 == line.len();
        let (file, Some(anchor)) = link.parts() else { return None };
        if !is_whole || file.is_empty() {
            return None;
        }
        let path = resolve(START, &link);
        let section = section(self.pages.get(&path)?, anchor)?;
        Some(self.relinked(&path, &section, START))
    }

    /// Rewrites the links in `text`, which is of the page `origin`, for the page at `path`.
    fn relinked(&self, origin: &str, text: &str, path: &str) -> String {
        let mut rewritten = String::new();
        let prose: BTreeSet<usize> = markdown::prose(text).map(|(number, _)| number).collect();
        for (number, line) in text.lines().enumerate() {
            let mut done = 0;
            for link in markdown::links(line).filter(|_| prose.contains(&number)) {
                rewritten += &line[done..link.start];
                done = link.start + link.target.len();
                match self.target(origin, &link, path) {
                    Some(target) => rewritten += &target,
                    None => {
                        rewritten.truncate(rewritten.len() - "](".len());
                        if let Some(start) = opening(&rewritten) {
                            rewritten.remove(start);
                        }
                        done += ")".len();
                    }
                }
            }
            rewritten += &line[done..];
            rewritten += "\n";
        }
        rewritten
    }

    /// Returns the target of a link of the page `origin` in the page at `path`, or `None` if the book lacks it.
    fn target(&self, origin: &str, link: &Link<'_>, path: &str) -> Option<String> {
        let (file, anchor) = link.parts();
        let target = resolve(origin, link);
        if !(self.pages.contains_key(&target) || self.assets.contains(&target)) {
            return None;
        }
        let anchor = anchor.map(|anchor| format!("#{anchor}")).unwrap_or_default();
        if file.is_empty() && origin == path {
            return Some(anchor);
        }
        Some(relative(&place(path), &place(&target)) + &anchor)
    }
}

/// Returns the place of a file in the book, relative to the folder of its sources.
pub(super) fn place(path: &str) -> String {
    match path.strip_prefix("docs/") {
        Some(rest) => rest.to_owned(),
        None => format!("source/{path}"),
    }
}

fn manual_place(name: &str) -> String {
    format!("man/{name}.1.md")
}

fn is_page(path: &str) -> bool {
    Path::new(path).extension().is_some_and(|extension| extension == "md")
}

/// Returns the path from the root to which a link of a page leads.
fn resolve(page: &str, link: &Link<'_>) -> String {
    markdown::resolve(page, link.parts().0).to_string_lossy().into_owned()
}

/// Returns the sections of the index as parts, each page in the first one that names it.
fn parts(index: &str) -> Vec<Part> {
    let mut parts: Vec<Part> = vec![];
    let mut seen = BTreeSet::new();
    for (_, line) in markdown::prose(index) {
        if let Some((2, title)) = markdown::heading(line) {
            parts.push(Part { title: title.to_owned(), pages: vec![] });
        }
        let Some(part) = parts.last_mut() else { continue };
        let pages = markdown::links(line).map(|link| resolve(INDEX, &link));
        part.pages.extend(pages.filter(|path| is_page(path) && seen.insert(path.clone())));
    }
    parts
}

/// Returns the section of a page whose heading has the anchor, up to the next heading of its level or above.
fn section(text: &str, anchor: &str) -> Option<String> {
    let headings = markdown::prose(text)
        .filter_map(|(number, line)| Some((number, line, markdown::heading(line)?.0)));
    let mut from = headings.skip_while(|(_, line, _)| !markdown::anchors(line).contains(anchor));
    let (start, _, level) = from.next()?;
    let end = from.find(|(_, _, next)| *next <= level).map(|(number, ..)| number);
    let lines: Vec<&str> = text.lines().collect();
    Some(lines[start..end.unwrap_or(lines.len())].join("\n"))
}

/// Returns the place of the bracket that opens the text of a link, which ends at the end of `text`.
fn opening(text: &str) -> Option<usize> {
    let mut closed = 0;
    for (place, c) in text.char_indices().rev() {
        match c {
            ']' => closed += 1,
            '[' if closed == 0 => return Some(place),
            '[' => closed -= 1,
            _ => {}
        }
    }
    None
}

/// Returns the path from the folder of the file `from` to the file `to`.
fn relative(from: &str, to: &str) -> String {
    let mut folder: Vec<&str> = from.split('/').collect();
    folder.pop();
    let target: Vec<&str> = to.split('/').collect();
    let common = folder.iter().zip(&target).take_while(|(a, b)| a == b).count();
    "../".repeat(folder.len() - common) + &target[common..].join("/")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a repository with these files.
    fn repository(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            super::super::write(&root.path().join(path), text.as_bytes()).unwrap();
        }
        root
    }

    const FILES: [(&str, &str); 6] = [
        ("README.md", "# Top\n## Use\n| a | [guide](docs/a.md#part), [here](#use) |\n## End\n"),
        (START, "# Start\n![p](pictures/p.svg)\n[Use](../README.md#use)\n"),
        (
            INDEX,
            "# Index\n[start](start.md)\n## Guides\n[a](a.md) [a](a.md)\n## Lab\n[b](lab/b.md)\n",
        ),
        (
            "docs/a.md",
            "# A `guide`\n## Part\n[b](lab/b.md), a\n[folder](../crates), [x](../c.toml)\n",
        ),
        ("docs/lab/b.md", "# B\n```sh\n[no](link.md)\n```\n[up](../a.md#part) [top](#b)\n"),
        ("docs/pictures/p.svg", "<svg/>"),
    ];

    #[test]
    fn summary_has_each_page_once_by_the_sections_of_the_index() {
        let root = repository(&FILES);
        super::super::write(&root.path().join("crates/x"), b"").unwrap();
        super::super::write(&root.path().join("c.toml"), b"").unwrap();
        let pages = Pages::collect(root.path()).unwrap();
        let manual = BTreeMap::from([("ringfence-run".to_owned(), "text".to_owned())]);
        let sources = pages.sources(&manual);
        assert_eq!(
            sources["SUMMARY.md"],
            "# Summary\n\n[Start](start.md)\n[All pages](README.md)\n\n# Guides\n\n- [A `guide`](a.md)\n\n# Lab\n\n\
             - [B](lab/b.md)\n\n# Manual pages\n\n- [ringfence-run(1)](man/ringfence-run.1.md)\n\n# Source tree\n\n\
             - [Top](source/README.md)\n"
        );
        assert_eq!(pages.assets().collect::<Vec<_>>(), ["c.toml", "docs/pictures/p.svg"]);
        assert_eq!(sources["man/ringfence-run.1.md"], "text");
    }

    #[test]
    fn links_lead_to_the_places_of_the_book_and_sections_are_inserted() {
        let root = repository(&FILES);
        super::super::write(&root.path().join("crates/x"), b"").unwrap();
        super::super::write(&root.path().join("c.toml"), b"").unwrap();
        let sources = Pages::collect(root.path()).unwrap().sources(&BTreeMap::new());
        assert_eq!(
            sources["a.md"],
            "# A `guide`\n## Part\n[b](lab/b.md), a\nfolder, [x](source/c.toml)\n"
        );
        assert_eq!(
            sources["lab/b.md"],
            "# B\n```sh\n[no](link.md)\n```\n[up](../a.md#part) [top](#b)\n"
        );
        assert_eq!(
            sources["start.md"],
            "# Start\n![p](pictures/p.svg)\n## Use\n| a | [guide](a.md#part), [here](source/README.md#use) |\n\n"
        );
        assert!(sources["source/README.md"].contains("[guide](../a.md#part), [here](#use)"));
    }

    #[test]
    fn page_that_the_index_lacks_and_link_without_file_are_errors() {
        let lacking = [("docs/new.md", "# New\n")];
        let broken = [("docs/lab/b.md", "[gone](gone.md)\n")];
        for (files, expected) in [(lacking, "no link to docs/new.md"), (broken, "leads to no file")]
        {
            let root = repository(&FILES);
            super::super::write(&root.path().join("crates/x"), b"").unwrap();
            super::super::write(&root.path().join("c.toml"), b"").unwrap();
            for (path, text) in files {
                super::super::write(&root.path().join(path), text.as_bytes()).unwrap();
            }
            let error = Pages::collect(root.path()).err().unwrap().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn every_page_of_docs_is_in_the_summary() {
        let root = crate::repository_root().unwrap();
        let sources = Pages::collect(&root).unwrap().sources(&BTreeMap::new());
        for page in WalkDir::new(root.join("docs")) {
            let page = page.unwrap();
            let path = page.path().strip_prefix(&root).unwrap().to_string_lossy();
            if is_page(&path) {
                let entry = format!("]({})\n", place(&path));
                assert_eq!(sources["SUMMARY.md"].matches(&entry).count(), 1, "{path}");
            }
        }
        assert!(sources["start.md"].contains("## Use this when"), "{}", sources["start.md"]);
    }
}
