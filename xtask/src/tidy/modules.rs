//! Module graph of the packages, and the rule about dead files: cargo does not compile a file without a `mod`
//! item, so its code and tests are never checked.

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};

use super::finding::Finding;
use super::tree::{Tree, for_tests};

/// File that cargo compiles as a crate root.
pub(super) struct Root {
    pub(super) path: String,
    pub(super) kind: Kind,
}

/// Kinds of crate roots.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// Library or program for users.
    Product,
    /// Test, benchmark, example or build script.
    Support,
}

/// Returns the crate roots of every package, by cargo's conventions and by explicit `path` keys.
pub(super) fn roots(tree: &Tree) -> Vec<Root> {
    let mut roots = vec![];
    for (manifest_path, text) in &tree.files {
        let Some(package) = manifest_path.strip_suffix("Cargo.toml") else {
            continue;
        };
        // Cargo itself reports a manifest that does not parse.
        let Ok(manifest) = text.parse::<toml::Table>() else {
            continue;
        };
        let listed = ["lib", "bin", "test", "bench", "example"].map(|kind| paths(&manifest, kind));
        let [lib, bin, test, bench, example] = listed;
        let below = tree.sources.keys().filter_map(|path| path.strip_prefix(package));
        for path in below {
            let is = |list: &[String]| list.iter().any(|listed| listed == path);
            let kind = if is(&lib) || is(&bin) {
                Kind::Product
            } else if is(&test) || is(&bench) || is(&example) {
                Kind::Support
            } else if let Some(kind) = conventional(path) {
                kind
            } else {
                continue;
            };
            let kind = if package == "fuzz/" { Kind::Support } else { kind };
            roots.push(Root { path: format!("{package}{path}"), kind });
        }
    }
    roots
}

/// Returns the kind of root that cargo and cargo-fuzz derive from a path in a package.
fn conventional(path: &str) -> Option<Kind> {
    let parts: Vec<&str> = path.split('/').collect();
    match parts.as_slice() {
        ["src", "lib.rs" | "main.rs"] | ["src", "bin", _] | ["src", "bin", _, "main.rs"] => {
            Some(Kind::Product)
        }
        ["build.rs"]
        | ["tests" | "benches" | "examples" | "fuzz_targets", _]
        | ["tests" | "benches" | "examples", _, "main.rs"] => Some(Kind::Support),
        _ => None,
    }
}

/// Returns the explicit paths of a manifest's targets of one kind.
fn paths(manifest: &toml::Table, kind: &str) -> Vec<String> {
    let targets = match manifest.get(kind) {
        Some(toml::Value::Array(targets)) => targets.as_slice(),
        Some(target) => std::slice::from_ref(target),
        None => &[],
    };
    let path = |target: &toml::Value| Some(target.get("path")?.as_str()?.to_owned());
    targets.iter().filter_map(path).collect()
}

/// Place of a file in the module graph.
pub(super) struct Place {
    /// Path of the crate root that reaches the file.
    pub(super) root: String,
    /// Path of the module in its crate; empty for the root.
    pub(super) module: Vec<String>,
    /// Set if one way leads from a product root to the file without `#[cfg(test)]`.
    pub(super) in_product: bool,
}

/// Returns the files that are reachable by `mod` items from the crate roots. A file that several crates compile has its
/// place in one of them, in a product if there is one.
pub(super) fn reach(tree: &Tree) -> BTreeMap<String, Place> {
    let mut reached: BTreeMap<String, Place> = BTreeMap::new();
    let start = |root: Root| {
        let in_product = root.kind == Kind::Product;
        (root.path.clone(), Place { root: root.path, module: vec![], in_product }, true)
    };
    let mut open: Vec<(String, Place, bool)> = roots(tree).into_iter().map(start).collect();
    while let Some((path, place, owns_folder)) = open.pop() {
        let Some(source) = tree.sources.get(&path) else {
            continue;
        };
        if reached.get(&path).is_some_and(|known| known.in_product || !place.in_product) {
            continue;
        }
        let file = Path::new(&path);
        let folder = file.parent().unwrap_or(Path::new("")).to_path_buf();
        let owns_folder = owns_folder || file.ends_with("mod.rs");
        let modules = if owns_folder { folder.clone() } else { file.with_extension("") };
        let (module, in_product) = (place.module.clone(), place.in_product);
        let mut finder = ModFinder { folder, modules, module, in_product, found: vec![] };
        finder.visit_file(&source.syntax);
        let found = finder.found.into_iter();
        open.extend(found.map(|(path, module, in_product)| {
            (normal(&path), Place { root: place.root.clone(), module, in_product }, false)
        }));
        reached.insert(path, place);
    }
    reached
}

/// Returns `path` without the components `.` and `..`.
fn normal(path: &Path) -> String {
    let mut parts: Vec<&str> = vec![];
    for part in path.components() {
        match part {
            Component::ParentDir => drop(parts.pop()),
            Component::Normal(part) => parts.extend(part.to_str()),
            _ => {}
        }
    }
    parts.join("/")
}

/// Collector of the files that the `mod` items of one file may name.
struct ModFinder {
    /// Directory of the file, to which explicit paths and `include!` are relative.
    folder: PathBuf,
    /// Directory of the modules in the current scope.
    modules: PathBuf,
    /// Path of the current scope in the crate.
    module: Vec<String>,
    in_product: bool,
    /// Path of each file, its module, and `true` unless only tests compile it.
    found: Vec<(PathBuf, Vec<String>, bool)>,
}

impl ModFinder {
    /// Adds the files that may hold the module `name`.
    fn add(&mut self, name: &str, path: Option<String>) {
        let files = match path {
            Some(path) => vec![self.folder.join(path)],
            None => vec![
                self.modules.join(format!("{name}.rs")),
                self.modules.join(name).join("mod.rs"),
            ],
        };
        let module = [&self.module[..], &[name.to_owned()]].concat();
        self.found.extend(files.into_iter().map(|file| (file, module.clone(), self.in_product)));
    }

    /// Finds `mod NAME;` in the tokens of a macro, which are not parsed as items.
    fn scan(&mut self, tokens: TokenStream) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        for (i, token) in tokens.iter().enumerate() {
            match (token, tokens.get(i + 1), tokens.get(i + 2)) {
                (TokenTree::Group(group), ..) => self.scan(group.stream()),
                (
                    TokenTree::Ident(word),
                    Some(TokenTree::Ident(name)),
                    Some(TokenTree::Punct(end)),
                ) if word == "mod" && end.as_char() == ';' => {
                    self.add(name.to_string().trim_start_matches("r#"), None);
                }
                _ => {}
            }
        }
    }
}

impl<'ast> Visit<'ast> for ModFinder {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        let outer = self.in_product;
        self.in_product = outer && !for_tests(&item.attrs);
        let name = item.ident.to_string();
        let name = name.trim_start_matches("r#");
        if item.content.is_some() {
            self.modules.push(name);
            self.module.push(name.to_owned());
            visit::visit_item_mod(self, item);
            self.module.pop();
            self.modules.pop();
        } else {
            self.add(name, explicit_path(&item.attrs));
        }
        self.in_product = outer;
    }

    fn visit_macro(&mut self, mac: &'ast syn::Macro) {
        if mac.path.is_ident("include")
            && let Ok(path) = mac.parse_body::<syn::LitStr>()
        {
            let path = self.folder.join(path.value());
            self.found.push((path, self.module.clone(), self.in_product));
        }
        self.scan(mac.tokens.clone());
    }
}

/// Returns the value of `#[path = "..."]`. A path inside `cfg_attr` is not supported.
fn explicit_path(attributes: &[syn::Attribute]) -> Option<String> {
    attributes.iter().find_map(|attribute| {
        let syn::Meta::NameValue(pair) = &attribute.meta else {
            return None;
        };
        let syn::Expr::Lit(value) = &pair.value else {
            return None;
        };
        let syn::Lit::Str(path) = &value.lit else {
            return None;
        };
        pair.path.is_ident("path").then(|| path.value())
    })
}

/// Returns findings for Rust files that no crate root reaches.
pub(super) fn dead_files(tree: &Tree) -> Vec<Finding> {
    let dead = tree.sources.keys().filter(|path| !tree.reached.contains_key(*path));
    dead.map(|path| {
        Finding::file(path, "is dead: no crate compiles it; name it by a `mod`, or delete it")
    })
    .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dead(tree: &Tree) -> Vec<String> {
        dead_files(tree).into_iter().map(|finding| finding.path).collect()
    }

    #[test]
    fn file_without_mod_item_is_a_finding() {
        let tree = Tree::from_files([
            ("crates/net/Cargo.toml", "[package]\nname = \"n\"\n"),
            ("crates/net/src/lib.rs", "mod used;\nmod folder;\nmod inline { mod deep; }\n"),
            ("crates/net/src/used.rs", "mod child;\n"),
            ("crates/net/src/used/child.rs", ""),
            ("crates/net/src/folder/mod.rs", "mod beside;\n"),
            ("crates/net/src/folder/beside.rs", ""),
            ("crates/net/src/inline/deep.rs", ""),
            ("crates/net/src/forgotten.rs", "mod also;\n"),
            ("crates/net/src/forgotten/also.rs", ""),
        ]);
        assert_eq!(
            dead(&tree),
            ["crates/net/src/forgotten.rs", "crates/net/src/forgotten/also.rs"]
        );
    }

    #[test]
    fn tests_examples_and_listed_targets_are_crate_roots() {
        let tree = Tree::from_files([
            (
                "crates/a/Cargo.toml",
                "[package]\nname = \"a\"\n[[bin]]\nname = \"b\"\npath = \"odd/b.rs\"\n",
            ),
            ("crates/a/odd/b.rs", "#[path = \"elsewhere.rs\"]\nmod x;\n"),
            ("crates/a/odd/elsewhere.rs", ""),
            ("crates/a/tests/one.rs", "mod common;\n"),
            ("crates/a/tests/common/mod.rs", ""),
            ("crates/a/examples/e.rs", "include!(\"../common.rs\");\n"),
            ("crates/a/common.rs", ""),
        ]);
        assert_eq!(dead(&tree), [] as [&str; 0]);
    }

    #[test]
    fn module_declared_in_macro_is_reached() {
        let tree = Tree::from_files([
            ("crates/a/Cargo.toml", "[package]\nname = \"a\"\n"),
            ("crates/a/src/lib.rs", "cfg_if! { if #[cfg(unix)] { mod unix; } }\n"),
            ("crates/a/src/unix.rs", ""),
        ]);
        assert_eq!(dead(&tree), [] as [&str; 0]);
    }

    #[test]
    fn file_behind_cfg_test_is_test_code_unless_product_reaches_it() {
        let tree = Tree::from_files([
            ("crates/a/Cargo.toml", "[package]\nname = \"a\"\n"),
            ("crates/a/src/lib.rs", "#[cfg(test)]\nmod tests;\nmod both;\n"),
            ("crates/a/src/tests.rs", "#[path = \"both.rs\"]\nmod again;\n"),
            ("crates/a/src/both.rs", ""),
        ]);
        assert!(tree.sources["crates/a/src/tests.rs"].test_only);
        assert!(!tree.sources["crates/a/src/both.rs"].test_only);
        assert!(!tree.sources["crates/a/src/lib.rs"].test_only);
    }
}
