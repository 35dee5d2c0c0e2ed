//! Rule about import cycles: at most three files of a package use each other in a cycle.
//!
//! An edge leads from a file to each other file of the same crate that one of its paths names ([`paths`]). These are
//! edges:
//!
//! * each `use`, at the head of a file or inside a function. A re-export (`pub use child::Item`) is one too: a module that
//!   offers an item of its child does not compile without the child;
//! * each path of two or more words in an expression, a type, a pattern, a macro or an attribute;
//! * paths from the crate (`crate::a`), from the module (`self::a`, `super::super::a`), from a module that the file declares
//!   (`child::f`), and from a name that a `use` brought into scope (`use crate::a; a::b::f()`), `use x::*` included.
//!
//! These are none: the declaration `mod child;`, the visibility `pub(in a::b)`, a macro that is found by its place in the
//! text, and a method of a type that the file does not name.
//!
//! An edge leads to the file that the path names. `super::Item` is an edge to the parent's file also if the parent
//! re-exports `Item` from a child; the parent's re-export is the second edge. So a child that takes a sibling's item from
//! the parent forms a cycle with the parent; it takes the item from the sibling instead.
//!
//! Test code does not count. A strongly connected component of more than [`CYCLE_FILES`] files is one finding, which shows
//! the edges inside it. There is no list of exceptions.

mod paths;

use std::collections::{BTreeMap, BTreeSet};

use super::finding::Finding;
use super::tree::Tree;
use paths::{Module, Words};

/// Maximum number of files in a cycle.
const CYCLE_FILES: usize = 3;

/// Maximum number of names that one path goes through, against names that refer to each other.
const NAMES_MAX: usize = 6;

/// Returns a finding for each import cycle over the limit, at its first file in alphabetical order.
pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let graph = graph(tree);
    let finding = |cycle: Vec<String>| {
        let mut message = format!(
            "{} files use each other in a cycle; cut edges until at most {CYCLE_FILES} do:",
            cycle.len()
        );
        for from in &cycle {
            for (to, paths) in graph[from].iter().filter(|(to, _)| cycle.contains(to)) {
                let paths = paths.iter().cloned().collect::<Vec<_>>().join(", ");
                message += &format!("\n    {from} -> {to}: {paths}");
            }
        }
        Finding::file(&cycle[0], message)
    };
    cycles(&graph).into_iter().map(finding).collect()
}

/// Edges from each file to other files, with the paths that make them.
type Graph = BTreeMap<String, BTreeMap<String, BTreeSet<String>>>;

/// Returns the import graph of all crates, without test code.
fn graph(tree: &Tree) -> Graph {
    let mut crates: BTreeMap<&str, Modules<'_>> = BTreeMap::new();
    for (path, place) in tree.reached.iter().filter(|(_, place)| place.in_product) {
        let known = crates.entry(&place.root).or_default();
        for module in paths::modules(&tree.sources[path], &place.module) {
            known.0.entry(module.path.clone()).or_default().push((path, module));
        }
    }
    let mut graph = Graph::new();
    for modules in crates.values() {
        for (file, module) in modules.0.values().flatten() {
            let edges = graph.entry((*file).to_owned()).or_default();
            for path in &module.paths {
                for target in modules.resolve(&module.path, path, NAMES_MAX) {
                    for to in modules.files_of(&target).filter(|to| to != file) {
                        edges.entry(to.to_owned()).or_default().insert(path.join("::"));
                    }
                }
            }
        }
    }
    graph
}

/// Modules of a crate by their path, each with its file. A path has several modules if `cfg` chooses between them.
#[derive(Default)]
struct Modules<'a>(BTreeMap<Words, Vec<(&'a str, Module)>>);

impl<'a> Modules<'a> {
    /// Returns the absolute paths that a path in the module `here` may mean: none for an item of another crate, several if
    /// functions of the module give one name to different items.
    fn resolve(&self, here: &[String], path: &[String], names_left: usize) -> Vec<Words> {
        let Some(first) = path.first() else { return vec![] };
        match first.as_str() {
            "crate" => return vec![path[1..].to_vec()],
            "self" | "super" => return vec![upwards(here, path)],
            _ => {}
        }
        let Some(modules) = self.0.get(here) else { return vec![] };
        let modules = || modules.iter().map(|(_, module)| module);
        if modules().any(|module| module.children.contains(first)) {
            return vec![[here, path].concat()];
        }
        if names_left == 0 {
            return vec![];
        }
        let named = modules().flat_map(|module| &module.names);
        let named = named.filter(|(name, target)| name == first && target[..] != path[..1]);
        let named: Vec<Words> = named
            .flat_map(|(_, target)| {
                self.resolve(here, &[&target[..], &path[1..]].concat(), names_left - 1)
            })
            .collect();
        if !named.is_empty() {
            return named;
        }
        let globs = modules().flat_map(|module| &module.globs);
        let globs = globs.flat_map(|glob| self.resolve(here, glob, names_left - 1));
        globs
            .filter(|module| module != here)
            .flat_map(|module| self.resolve(&module, path, names_left - 1))
            .collect()
    }

    /// Returns the files of the longest prefix of a path that is a module.
    fn files_of(&self, path: &[String]) -> impl Iterator<Item = &'a str> {
        let found = (0..=path.len()).rev().find_map(|length| self.0.get(&path[..length]));
        found.into_iter().flatten().map(|(file, _)| *file)
    }
}

/// Returns the absolute form of a path that begins with `self` or `super` in the module `here`.
fn upwards(here: &[String], path: &[String]) -> Words {
    let is_start = |word: &&String| ["self", "super"].contains(&word.as_str());
    let start = path.iter().take_while(is_start).count();
    let up = path[..start].iter().filter(|word| *word == "super").count();
    [&here[..here.len().saturating_sub(up)], &path[start..]].concat()
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
    let mut open: Vec<&String> = graph[from].keys().collect();
    while let Some(node) = open.pop() {
        if seen.insert(node) {
            open.extend(graph.get(node).into_iter().flat_map(BTreeMap::keys));
        }
    }
    seen
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the edges of a crate with these files below `src/` as `from -> to: paths`.
    fn edges<const N: usize>(files: [(&str, &str); N]) -> Vec<String> {
        let lines = graph(&tree(files)).into_iter().flat_map(|(from, to)| {
            let line = move |(to, paths): (String, BTreeSet<String>)| {
                let paths: Vec<String> = paths.into_iter().collect();
                format!("{from} -> {to}: {}", paths.join(", ")).replace("crates/x/src/", "")
            };
            to.into_iter().map(line)
        });
        lines.collect()
    }

    fn tree<const N: usize>(files: [(&str, &str); N]) -> Tree {
        let paths = files.map(|(path, text)| (format!("crates/x/src/{path}"), text));
        let mut all = vec![("crates/x/Cargo.toml", "[package]\nname = \"x\"\n")];
        all.extend(paths.iter().map(|(path, text)| (path.as_str(), *text)));
        Tree::from_list(&all)
    }

    /// Returns the edges from `a.rs` with this text in a crate with the modules a, a::child and b.
    fn edges_of(text: &str) -> Vec<String> {
        let a = format!("mod child;\n{text}");
        edges([
            ("lib.rs", "mod a;\nmod b;\n"),
            ("a.rs", &a),
            ("a/child.rs", "mod deep;\n"),
            ("a/child/deep.rs", ""),
            ("b.rs", "mod inner;\n"),
            ("b/inner.rs", ""),
        ])
    }

    const CHILD: [&str; 1] = ["a.rs -> a/child.rs: child::f"];
    const B: [&str; 1] = ["a.rs -> b.rs: crate::b::f"];

    #[test]
    fn declaration_of_a_module_is_no_edge() {
        assert_eq!(edges_of(""), [] as [&str; 0]);
        assert_eq!(edges_of("pub(in crate::b) fn f() {}\n"), [] as [&str; 0]);
    }

    #[test]
    fn relative_use_is_an_edge() {
        assert_eq!(edges_of("use child::f;\n"), CHILD);
        assert_eq!(edges_of("use child::{self};\n"), ["a.rs -> a/child.rs: child"]);
        assert_eq!(edges_of("use child::deep::*;\n"), ["a.rs -> a/child/deep.rs: child::deep"]);
        assert_eq!(
            edges_of("use child::{deep::{F, self as d}, G};\n"),
            [
                "a.rs -> a/child.rs: child::G",
                "a.rs -> a/child/deep.rs: child::deep, child::deep::F"
            ]
        );
    }

    #[test]
    fn use_from_crate_self_and_super_is_an_edge() {
        assert_eq!(edges_of("use crate::b::f;\n"), B);
        assert_eq!(edges_of("use self::child::f;\n"), ["a.rs -> a/child.rs: self::child::f"]);
        assert_eq!(edges_of("use super::b::f;\n"), ["a.rs -> b.rs: super::b::f"]);
        assert_eq!(edges_of("use self::super::b::f;\n"), ["a.rs -> b.rs: self::super::b::f"]);
        let deep = [
            ("lib.rs", "mod a;\nmod b;\n"),
            ("a.rs", "mod child;\n"),
            ("a/child.rs", "fn f() { super::super::b::g() }\n"),
            ("b.rs", ""),
        ];
        assert_eq!(edges(deep), ["a/child.rs -> b.rs: super::super::b::g"]);
    }

    #[test]
    fn reexport_is_an_edge() {
        assert_eq!(edges_of("pub use child::f;\n"), CHILD);
        assert_eq!(edges_of("pub(crate) use child as c;\n"), ["a.rs -> a/child.rs: child"]);
        assert_eq!(edges_of("pub use crate::b::f;\n"), B);
    }

    #[test]
    fn use_inside_a_function_is_an_edge() {
        assert_eq!(edges_of("fn g() { use child::f; f() }\n"), CHILD);
        assert_eq!(edges_of("impl T { fn g() { if true { use crate::b::f; } } }\n"), B);
    }

    #[test]
    fn full_path_in_an_expression_is_an_edge() {
        assert_eq!(edges_of("fn g() { child::f() }\n"), CHILD);
        assert_eq!(edges_of("const C: u8 = crate::b::f;\n"), B);
        assert_eq!(edges_of("fn g() { x.map(crate::b::f) }\n"), B);
        assert_eq!(edges_of("fn g() { let x = child::f { y }; }\n"), CHILD);
        assert_eq!(edges_of("fn g() { x.parse::<child::f>() }\n"), CHILD);
    }

    #[test]
    fn full_path_in_a_type_is_an_edge() {
        assert_eq!(edges_of("struct S(Vec<child::f>);\n"), CHILD);
        assert_eq!(edges_of("fn g(x: &mut crate::b::f) {}\n"), B);
        assert_eq!(edges_of("fn g() -> impl child::f {}\n"), CHILD);
        assert_eq!(edges_of("impl crate::b::f for u8 {}\n"), B);
        assert_eq!(edges_of("impl<T: child::f> S<T> where T: child::f {}\n"), CHILD);
        assert_eq!(
            edges_of("type T = <u8 as crate::b::f>::Output;\n"),
            ["a.rs -> b.rs: crate::b::f::Output"]
        );
    }

    #[test]
    fn full_path_in_a_pattern_is_an_edge() {
        assert_eq!(edges_of("fn g() { match x { child::f => {} _ => {} } }\n"), CHILD);
        assert_eq!(edges_of("fn g() { if let crate::b::f(x) = y {} }\n"), B);
        assert_eq!(edges_of("fn g(child::f { x, .. }: T) {}\n"), CHILD);
    }

    #[test]
    fn path_in_a_macro_is_an_edge() {
        assert_eq!(edges_of("fn g() { println!(\"{}\", child::f(1)) }\n"), CHILD);
        assert_eq!(edges_of("fn g() { matches!(0..child::f, x if x == [child::f]) }\n"), CHILD);
        assert_eq!(edges_of("fn g() { crate::b::f!() }\n"), B);
        let definition = "macro_rules! m { ($x:ty) => { $crate::b::f::<$x>() }; }\n";
        assert_eq!(edges_of(definition), B);
        let import = "some! { use crate::{b::f, a::child}; }\n";
        assert_eq!(
            edges_of(import),
            ["a.rs -> a/child.rs: crate::a::child", "a.rs -> b.rs: crate::b::f"]
        );
        let others = "some! { x.child::<u8>(); ::child::f(); $child::f(); <T>::child::f() }\n";
        assert_eq!(edges_of(others), [] as [&str; 0]);
    }

    #[test]
    fn path_in_an_attribute_is_an_edge() {
        assert_eq!(edges_of("struct S { #[arg(value_parser = child::f)] x: u8 }\n"), CHILD);
        assert_eq!(
            edges_of(
                "struct S { #[serde(default, deserialize_with = \"child::f::<1>\")] x: u8 }\n"
            ),
            CHILD
        );
        assert_eq!(edges_of("#[doc = \"child::f\"]\nstruct S;\n"), [] as [&str; 0]);
    }

    #[test]
    fn path_from_an_imported_module_is_an_edge_to_its_child() {
        let both = ["a.rs -> b.rs: crate::b", "a.rs -> b/inner.rs: b::inner::f"];
        assert_eq!(edges_of("use crate::b;\nfn g() { b::inner::f() }\n"), both);
        let renamed = "use crate::b as c;\nuse c::inner;\nfn g() { inner::f() }\n";
        assert_eq!(
            edges_of(renamed),
            ["a.rs -> b.rs: crate::b", "a.rs -> b/inner.rs: c::inner, inner::f"]
        );
        let glob = "use super::*;\nfn g() { b::inner::f() }\n";
        assert_eq!(edges_of(glob), ["a.rs -> b/inner.rs: b::inner::f", "a.rs -> lib.rs: super"]);
        assert_eq!(edges_of("use x::{b, y as y};\nfn g() { b::f(); y::z() }\n"), [] as [&str; 0]);
    }

    #[test]
    fn path_in_an_inline_module_is_relative_to_it() {
        assert_eq!(edges_of("mod i { fn g() { child::f() } }\n"), [] as [&str; 0]);
        assert_eq!(
            edges_of("mod i { use super::child::f; }\n"),
            ["a.rs -> a/child.rs: super::child::f"]
        );
        assert_eq!(edges_of("mod i { mod j {} use j::x; }\nuse i::j::y;\n"), [] as [&str; 0]);
    }

    #[test]
    fn item_that_the_parent_reexports_is_an_edge_to_the_parent() {
        let files = [
            ("lib.rs", "mod a;\nmod b;\npub use b::Item;\n"),
            ("a.rs", "use crate::Item;\n"),
            ("b.rs", ""),
        ];
        assert_eq!(edges(files), ["a.rs -> lib.rs: crate::Item", "lib.rs -> b.rs: b::Item"]);
    }

    #[test]
    fn module_with_an_explicit_path_is_found_by_its_name() {
        let files = [
            ("lib.rs", "#[path = \"odd/file.rs\"]\nmod a;\nuse a::f;\n"),
            ("odd/file.rs", "use super::g;\n"),
        ];
        assert_eq!(
            edges(files),
            ["lib.rs -> odd/file.rs: a::f", "odd/file.rs -> lib.rs: super::g"]
        );
    }

    #[test]
    fn module_with_two_files_has_edges_to_both() {
        let files = [
            (
                "lib.rs",
                "#[cfg(x)]\nmod a;\n#[cfg(not(x))]\n#[path = \"b.rs\"]\nmod a;\nuse a::f;\n",
            ),
            ("a.rs", ""),
            ("b.rs", ""),
        ];
        assert_eq!(edges(files), ["lib.rs -> a.rs: a::f", "lib.rs -> b.rs: a::f"]);
    }

    #[test]
    fn test_code_has_no_edges() {
        assert_eq!(edges_of("#[cfg(test)]\nmod tests { use super::child::f; }\n"), [] as [&str; 0]);
        assert_eq!(edges_of("#[cfg(test)]\nuse child::f;\n"), [] as [&str; 0]);
        assert_eq!(edges_of("#[test]\nfn g() { child::f() }\n"), [] as [&str; 0]);
        let file = [
            ("lib.rs", "#[cfg(test)]\nmod t;\nmod a;\n"),
            ("t.rs", "use crate::a::f;\n"),
            ("a.rs", ""),
        ];
        assert_eq!(edges(file), [] as [&str; 0]);
    }

    const CIRCLE: [(&str, &str); 5] = [
        ("lib.rs", "mod a;\nmod b;\nmod c;\nmod d;\npub use a::A;\n"),
        ("a.rs", "use crate::b::B;\n"),
        ("b.rs", "use super::c::{C, other};\n"),
        ("c/mod.rs", "use crate::d;\n"),
        ("d.rs", "fn f() { crate::a::g() }\n"),
    ];

    #[test]
    fn circle_of_four_files_is_a_finding_with_its_edges() {
        let found = check(&tree(CIRCLE));
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(
            found[0].to_string().replace("crates/x/src/", ""),
            "a.rs: 4 files use each other in a cycle; cut edges until at most 3 do:\
             \n    a.rs -> b.rs: crate::b::B\
             \n    b.rs -> c/mod.rs: super::c::C, super::c::other\
             \n    c/mod.rs -> d.rs: crate::d\
             \n    d.rs -> a.rs: crate::a::g"
        );
    }

    #[test]
    fn circle_of_three_files_is_allowed() {
        let mut files = CIRCLE;
        files[3].1 = "use crate::a;\n";
        assert_eq!(check(&tree(files)), []);
    }

    #[test]
    fn parent_that_reexports_children_that_import_from_it_is_a_circle() {
        let files = [
            ("lib.rs", "mod a;\nmod b;\nmod c;\npub use a::A;\npub use b::B;\npub use c::C;\n"),
            ("a.rs", "use super::B;\n"),
            ("b.rs", "use super::C;\n"),
            ("c.rs", "use super::A;\n"),
        ];
        assert!(check(&tree(files))[0].to_string().contains("4 files use each other"));
        let mut siblings = files;
        siblings[1].1 = "use super::b::B;\n";
        siblings[2].1 = "use super::c::C;\n";
        siblings[3].1 = "";
        assert_eq!(check(&tree(siblings)), []);
    }
}
