//! Markdown of the project's pages: links, headings, anchors. Parses what the pages use, line by line.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

/// Link of a line: the byte range of its target in the line, and the target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Link<'a> {
    /// First byte of the target.
    pub(crate) start: usize,
    /// Target with its anchor, as it is written.
    pub(crate) target: &'a str,
}

impl<'a> Link<'a> {
    /// Returns the file and the anchor of the target. The file is empty in a link to the same page.
    pub(crate) fn parts(&self) -> (&'a str, Option<&'a str>) {
        match self.target.split_once('#') {
            Some((file, anchor)) => (file, Some(anchor)),
            None => (self.target, None),
        }
    }
}

/// Iterates over the relative links of a line, pictures included.
pub(crate) fn links(line: &str) -> impl Iterator<Item = Link<'_>> {
    let starts = line.match_indices("](").map(|(at, found)| at + found.len());
    let targets = starts.filter_map(|start| {
        let target = line[start..].split_once(')')?.0;
        Some(Link { start, target })
    });
    targets.filter(|Link { target, .. }| {
        !target.is_empty() && !target.contains("://") && !target.contains(' ')
    })
}

/// Iterates over the lines of a page that are outside of fenced blocks, with their numbers from 0.
pub(crate) fn prose(text: &str) -> impl Iterator<Item = (usize, &str)> {
    let mut in_block = false;
    text.lines().enumerate().filter(move |(_, line)| {
        let fence = line.starts_with("```");
        in_block ^= fence;
        !(in_block || fence)
    })
}

/// Returns level and text of a heading, with its markup.
pub(crate) fn heading(line: &str) -> Option<(usize, &str)> {
    let text = line.trim_start_matches('#');
    let level = line.len() - text.len();
    (level > 0).then(|| text.strip_prefix(' ')).flatten().map(|text| (level, text.trim()))
}

/// Returns the text of the first heading of level 1.
pub(crate) fn title(text: &str) -> Option<&str> {
    prose(text).filter_map(|(_, line)| heading(line)).find(|(level, _)| *level == 1).map(|(_, t)| t)
}

/// Returns the anchors of the headings, as GitHub and mdBook make them.
pub(crate) fn anchors(text: &str) -> BTreeSet<String> {
    let mut seen: BTreeMap<String, u32> = BTreeMap::new();
    let mut anchors = BTreeSet::new();
    for (_, heading) in prose(text).filter_map(|(_, line)| heading(line)) {
        let anchor = anchor(heading);
        let earlier = seen.entry(anchor.clone()).or_default();
        anchors.insert(match *earlier {
            0 => anchor,
            n => format!("{anchor}-{n}"),
        });
        *earlier += 1;
    }
    anchors
}

/// Returns the anchor of a heading that no earlier one of its page has.
fn anchor(heading: &str) -> String {
    let kept = without_targets(heading);
    let kept = kept.chars().filter_map(|c| match c {
        '-' | '_' => Some(c),
        c if c.is_alphanumeric() => Some(c.to_ascii_lowercase()),
        c if c.is_whitespace() => Some('-'),
        _ => None,
    });
    kept.collect()
}

/// Removes the targets of links, so that their texts remain.
fn without_targets(heading: &str) -> String {
    let mut parts = heading.split("](");
    let first = parts.next().unwrap_or_default().to_owned();
    parts.fold(first, |text, part| text + part.split_once(')').map_or(part, |(_, rest)| rest))
}

/// Returns the path from the root to which `file`, written in a page at `page`, leads.
pub(crate) fn resolve(page: &str, file: &str) -> PathBuf {
    if file.is_empty() {
        return PathBuf::from(page);
    }
    let mut path = Path::new(page).parent().unwrap_or(Path::new("")).to_owned();
    for component in Path::new(file).components() {
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
    fn relative_links_have_their_place_and_parts() {
        let line = "[a](b.md#c) [far](https://x.example/y) ![p](p.svg) [here](#d) [no](a b)";
        let found: Vec<_> = links(line).map(|link| (link.start, link.parts())).collect();
        assert_eq!(found, [(4, ("b.md", Some("c"))), (44, ("p.svg", None)), (58, ("", Some("d")))]);
    }

    #[test]
    fn anchors_are_those_of_headings_outside_of_blocks() {
        let text =
            "# The `run` command: a [link](x.md)\n## Limits\n```sh\n# no heading\n```\n## Limits\n";
        assert_eq!(title(text), Some("The `run` command: a [link](x.md)"));
        let expected = ["limits", "limits-1", "the-run-command-a-link"];
        assert_eq!(anchors(text), expected.map(String::from).into());
        assert_eq!(heading("#hash"), None);
    }

    #[test]
    fn links_resolve_from_the_folder_of_their_page() {
        assert_eq!(resolve("docs/perf/a.md", "../b.md"), Path::new("docs/b.md"));
        assert_eq!(resolve("docs/a.md", ""), Path::new("docs/a.md"));
        assert_eq!(resolve("a.md", "../up.md"), Path::new("../up.md"));
    }
}
