//! Rule about import cycles: at most three files of a package use each other in a cycle.
//!
//! An edge leads from a file to each file of the same package that one of its `use` declarations names
//! (`crate::`, `super::`, `self::`). Re-exports (`pub use`) are no edges, because a module that offers the items
//! of its children does not depend on them. Test code does not count.
//!
//! A strongly connected component of more than [`CYCLE_FILES`] files is one finding. Exceptions are listed in
//! `xtask/tidy.toml` with their number of files, which may only shrink.

use std::collections::{BTreeMap, BTreeSet};

use syn::visit::{self, Visit};

use super::tree::{Source, Tree, for_tests};
use super::{CONFIG, Finding};

/// Maximum number of files in a cycle.
const CYCLE_FILES: usize = 3;

/// Returns findings for import cycles over the limit that are not listed or have grown.
///
/// `listed` maps the first file of a cycle, in alphabetical order, to its number of files.
pub(super) fn check(tree: &Tree, listed: &BTreeMap<String, usize>) -> Vec<Finding> {
    let mut findings = vec![];
    let mut used = BTreeSet::new();
    for cycle in cycles(&graph(tree)) {
        let first = cycle[0].clone();
        let known = listed.get(&first).copied();
        used.insert(first.clone());
        if known == Some(cycle.len()) {
            continue;
        }
        let message = match known {
            None => format!(
                "{} files use each other in a cycle: {}. Move the shared part to its own file",
                cycle.len(),
                cycle.join(", ")
            ),
            Some(known) => format!(
                "{} files use each other in a cycle, {CONFIG} lists {known}: correct the number if \
                 it shrank, break the new part if it grew",
                cycle.len()
            ),
        };
        findings.push(Finding::file(&first, message));
    }
    for path in listed.keys().filter(|path| !used.contains(*path)) {
        let message = format!("no import cycle begins at {path}: remove the line");
        findings.push(Finding::file(CONFIG, message));
    }
    findings
}

/// Edges from each file to other files.
type Graph = BTreeMap<String, BTreeSet<String>>;

/// Returns the import graph of all packages, without test code.
fn graph(tree: &Tree) -> Graph {
    let mut graph = Graph::new();
    for (path, source) in &tree.sources {
        let Some((krate, module)) = module_of(path) else { continue };
        if source.test_only {
            continue;
        }
        let targets = imports(source).into_iter().filter_map(|import| {
            let absolute = resolve(&module, &import)?;
            file_of(tree, krate, &absolute).filter(|target| target != path)
        });
        graph.insert(path.clone(), targets.collect());
    }
    graph
}

/// Returns the source directory of the package and the module path of a file: `crates/net/src` and `["tx"]` for
/// `crates/net/src/tx/mod.rs`.
fn module_of(path: &str) -> Option<(&str, Vec<String>)> {
    let at = path.find("/src/")? + 4;
    let (krate, rest) = (&path[..at], &path[at + 1..]);
    let mut parts: Vec<String> = rest.strip_suffix(".rs")?.split('/').map(str::to_owned).collect();
    if matches!(parts.last().map(String::as_str), Some("mod" | "lib" | "main")) {
        parts.pop();
    }
    Some((krate, parts))
}

/// Returns the absolute module path of an import in `module`.
fn resolve(module: &[String], import: &[String]) -> Option<Vec<String>> {
    let mut absolute = match import.first()?.as_str() {
        "crate" => vec![],
        "self" | "super" => module.to_vec(),
        _ => return None,
    };
    for word in import {
        match word.as_str() {
            "crate" | "self" => {}
            "super" => drop(absolute.pop()),
            word => absolute.push(word.to_owned()),
        }
    }
    Some(absolute)
}

/// Returns the file of the longest prefix of a module path that has a file.
fn file_of(tree: &Tree, krate: &str, module: &[String]) -> Option<String> {
    for length in (0..=module.len()).rev() {
        let base = [&[krate.to_owned()], &module[..length]].concat().join("/");
        let candidates = if length == 0 {
            [format!("{base}/lib.rs"), format!("{base}/main.rs")]
        } else {
            [format!("{base}.rs"), format!("{base}/mod.rs")]
        };
        if let Some(found) = candidates.into_iter().find(|path| tree.sources.contains_key(path)) {
            return Some(found);
        }
    }
    None
}

/// Returns the paths in a file's `use` declarations, without re-exports and test code.
fn imports(source: &Source) -> Vec<Vec<String>> {
    let mut finder = Imports::default();
    finder.visit_file(&source.syntax);
    finder.found
}

#[derive(Default)]
struct Imports {
    found: Vec<Vec<String>>,
}

impl<'ast> Visit<'ast> for Imports {
    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        let private = matches!(item.vis, syn::Visibility::Inherited);
        if private && !for_tests(&item.attrs) {
            flatten(&item.tree, &mut vec![], &mut self.found);
        }
    }

    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        // Paths in an inline module are relative to it. In this project such modules contain tests.
        if item.content.is_none() || !for_tests(&item.attrs) {
            visit::visit_item_mod(self, item);
        }
    }
}

/// Appends each path of a use tree to `found`.
fn flatten(tree: &syn::UseTree, prefix: &mut Vec<String>, found: &mut Vec<Vec<String>>) {
    match tree {
        syn::UseTree::Path(path) => {
            prefix.push(path.ident.to_string());
            flatten(&path.tree, prefix, found);
            prefix.pop();
        }
        syn::UseTree::Name(syn::UseName { ident })
        | syn::UseTree::Rename(syn::UseRename { ident, .. }) => {
            found.push([&prefix[..], &[ident.to_string()]].concat());
        }
        syn::UseTree::Glob(_) => found.push(prefix.clone()),
        syn::UseTree::Group(group) => {
            for tree in &group.items {
                flatten(tree, prefix, found);
            }
        }
    }
}

/// Returns the strongly connected components of more than [`CYCLE_FILES`] files, each sorted.
///
/// Two files are in one component if each is reachable from the other. The graphs have a few hundred nodes, so
/// reachability is computed for each node.
fn cycles(graph: &Graph) -> Vec<Vec<String>> {
    let reach: BTreeMap<&String, BTreeSet<&String>> =
        graph.keys().map(|from| (from, reachable(graph, from))).collect();
    let mut done: BTreeSet<&String> = BTreeSet::new();
    let mut found = vec![];
    for from in graph.keys() {
        if done.contains(from) || !reach[from].contains(from) {
            continue;
        }
        let component: Vec<&String> = reach[from]
            .iter()
            .copied()
            .filter(|to| reach.get(to).is_some_and(|back| back.contains(from)))
            .collect();
        done.extend(&component);
        if component.len() > CYCLE_FILES {
            found.push(component.into_iter().cloned().collect());
        }
    }
    found
}

fn reachable<'a>(graph: &'a Graph, from: &String) -> BTreeSet<&'a String> {
    let mut seen = BTreeSet::new();
    let mut open: Vec<&String> = graph[from].iter().collect();
    while let Some(node) = open.pop() {
        if seen.insert(node) {
            open.extend(graph.get(node).into_iter().flatten());
        }
    }
    seen
}

#[cfg(test)]
mod tests {
    use super::*;

    const MANIFEST: (&str, &str) = ("crates/x/Cargo.toml", "[package]\nname = \"x\"\n");

    fn findings(files: [(&str, &str); 5], listed: &[(&str, usize)]) -> Vec<String> {
        let all: [(&str, &str); 6] =
            std::array::from_fn(|i| if i == 5 { MANIFEST } else { files[i] });
        let listed = listed.iter().map(|(path, size)| ((*path).to_owned(), *size)).collect();
        check(&Tree::from_files(all), &listed).iter().map(ToString::to_string).collect()
    }

    const CIRCLE: [(&str, &str); 5] = [
        ("crates/x/src/lib.rs", "mod a;\nmod b;\nmod c;\nmod d;\npub use a::A;\n"),
        ("crates/x/src/a.rs", "use crate::b::B;\n"),
        ("crates/x/src/b.rs", "use super::c::{C, other};\n"),
        ("crates/x/src/c/mod.rs", "use crate::d;\n"),
        ("crates/x/src/d.rs", "fn f() { use crate::a::A; }\n"),
    ];

    #[test]
    fn circle_of_four_files_is_a_finding_at_the_first() {
        let found = findings(CIRCLE, &[]);
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].starts_with("crates/x/src/a.rs: 4 files use each other"), "{found:?}");
    }

    #[test]
    fn circle_of_three_files_is_allowed() {
        let mut files = CIRCLE;
        files[3].1 = "use crate::a;\n";
        assert_eq!(findings(files, &[]), [] as [&str; 0]);
    }

    #[test]
    fn reexport_and_test_import_are_no_edges() {
        let mut files = CIRCLE;
        files[4].1 = "pub use crate::a::A;\n#[cfg(test)] mod tests { use crate::a::A; }\n";
        assert_eq!(findings(files, &[]), [] as [&str; 0]);
    }

    #[test]
    fn listed_circle_is_allowed_until_its_size_changes() {
        assert_eq!(findings(CIRCLE, &[("crates/x/src/a.rs", 4)]), [] as [&str; 0]);
        let grown = findings(CIRCLE, &[("crates/x/src/a.rs", 5)]);
        assert!(grown[0].contains("lists 5"), "{grown:?}");
        let stale = findings(CIRCLE, &[("crates/x/src/a.rs", 4), ("crates/x/src/q.rs", 4)]);
        assert!(stale[0].contains("no import cycle begins"), "{stale:?}");
    }
}
