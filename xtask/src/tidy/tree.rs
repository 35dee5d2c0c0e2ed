//! Files of the repository: their text, the parsed Rust sources, and the lines that only tests compile.

use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::path::Path;

use proc_macro2::{TokenStream, TokenTree};
use syn::spanned::Spanned as _;
use syn::visit::{self, Visit};

use super::finding::Finding;
use super::modules::{self, Place};

/// Directories without sources: results of builds and fuzzers. In a linked worktree `.git` is a file.
const LEFT_OUT: [&str; 5] = ["target", ".git", "corpus", "artifacts", "coverage"];

/// Files of the repository by their path relative to the root, with forward slashes.
#[derive(Default)]
pub(super) struct Tree {
    /// Every file that is valid UTF-8.
    pub(super) files: BTreeMap<String, String>,
    /// Rust files that parse.
    pub(super) sources: BTreeMap<String, Source>,
    /// Rust files that do not parse: line and reason.
    broken: BTreeMap<String, (usize, String)>,
    /// Files reachable from a crate root, with their places; see [`modules`].
    pub(super) reached: BTreeMap<String, Place>,
}

/// Rust file that was parsed.
pub(super) struct Source {
    pub(super) lines: Vec<String>,
    pub(super) syntax: syn::File,
    /// Tokens of the file, without comments.
    pub(super) tokens: TokenStream,
    /// Set if only tests compile this file.
    pub(super) test_only: bool,
    test_lines: Vec<RangeInclusive<usize>>,
}

impl Tree {
    /// Reads all files below `root`.
    pub(super) fn read(root: &Path) -> anyhow::Result<Tree> {
        let mut files = BTreeMap::new();
        let walk = walkdir::WalkDir::new(root).into_iter().filter_entry(|entry| {
            let name = entry.file_name().to_string_lossy();
            // Cargo marks every target directory with a cache tag, whatever its name.
            !(LEFT_OUT.contains(&&*name) || entry.path().join("CACHEDIR.TAG").exists())
        });
        for entry in walk {
            let entry = entry?;
            if !entry.file_type().is_file() {
                continue;
            }
            // Files that are no text (seeds of fuzzers, pictures) have no rules.
            if let Ok(text) = String::from_utf8(std::fs::read(entry.path())?) {
                let path = entry.path().strip_prefix(root)?.to_string_lossy().into_owned();
                files.insert(path, text);
            }
        }
        Ok(Tree::new(files))
    }

    fn new(files: BTreeMap<String, String>) -> Tree {
        let mut tree = Tree { files, ..Tree::default() };
        for (path, text) in &tree.files {
            if Path::new(path).extension().is_none_or(|extension| extension != "rs") {
                continue;
            }
            match Source::parse(text) {
                Ok(source) => drop(tree.sources.insert(path.clone(), source)),
                Err(why) => drop(tree.broken.insert(path.clone(), why)),
            }
        }
        let reached = modules::reach(&tree);
        for (path, place) in &reached {
            if let Some(source) = tree.sources.get_mut(path) {
                source.test_only = !place.in_product;
            }
        }
        tree.reached = reached;
        tree
    }

    /// Returns findings for sources that do not parse, since no rule can check them.
    pub(super) fn unreadable(&self) -> Vec<Finding> {
        let finding = |(path, (line, why)): (&String, &(usize, String))| {
            Finding::at(path, *line, format!("does not parse: {why}"))
        };
        self.broken.iter().map(finding).collect()
    }

    #[cfg(test)]
    pub(super) fn from_files<const N: usize>(files: [(&str, &str); N]) -> Tree {
        Tree::from_list(&files)
    }

    #[cfg(test)]
    pub(super) fn from_list(files: &[(&str, &str)]) -> Tree {
        let owned = |(path, text): &(&str, &str)| ((*path).to_owned(), (*text).to_owned());
        Tree::new(files.iter().map(owned).collect())
    }
}

impl Source {
    fn parse(text: &str) -> Result<Source, (usize, String)> {
        let error = |error: syn::Error| (error.span().start().line, error.to_string());
        let syntax = syn::parse_file(text).map_err(error)?;
        let tokens = text.parse().map_err(|e: proc_macro2::LexError| error(e.into()))?;
        let mut finder = TestFinder::default();
        finder.visit_file(&syntax);
        Ok(Source {
            lines: text.lines().map(str::to_owned).collect(),
            syntax,
            tokens,
            test_only: false,
            test_lines: finder.lines,
        })
    }

    /// Returns `true` if only tests compile this line (counted from 1).
    pub(super) fn is_test(&self, line: usize) -> bool {
        self.test_only || self.test_lines.iter().any(|range| range.contains(&line))
    }
}

/// Returns `true` if the attributes exclude an item from everything but tests: `#[test]`, `#[cfg(test)]`,
/// `#[cfg(all(test, ...))]`.
pub(super) fn for_tests(attributes: &[syn::Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        if attribute.path().is_ident("test") {
            return true;
        }
        let syn::Meta::List(list) = &attribute.meta else {
            return false;
        };
        attribute.path().is_ident("cfg") && needs_test(list.tokens.clone())
    })
}

/// Returns `true` if the predicate requires `test`.
fn needs_test(predicate: TokenStream) -> bool {
    let mut tokens = predicate.into_iter().peekable();
    while let Some(token) = tokens.next() {
        let TokenTree::Ident(word) = token else {
            continue;
        };
        match tokens.peek() {
            Some(TokenTree::Group(group)) if word == "all" => {
                if needs_test(group.stream()) {
                    return true;
                }
                tokens.next();
            }
            // `any` and `not` can hold without `test`.
            Some(TokenTree::Group(_)) => drop(tokens.next()),
            _ if word == "test" => return true,
            _ => {}
        }
    }
    false
}

/// Visitor that collects the line ranges of items that only tests compile.
#[derive(Default)]
struct TestFinder {
    lines: Vec<RangeInclusive<usize>>,
}

impl TestFinder {
    fn note(&mut self, attributes: &[syn::Attribute], span: proc_macro2::Span) -> bool {
        let found = for_tests(attributes);
        if found {
            self.lines.push(span.start().line..=span.end().line);
        }
        found
    }
}

/// Returns the attributes of an item that may have a doc comment.
pub(super) fn attributes_of(item: &syn::Item) -> &[syn::Attribute] {
    match item {
        syn::Item::Const(i) => &i.attrs,
        syn::Item::Enum(i) => &i.attrs,
        syn::Item::Fn(i) => &i.attrs,
        syn::Item::Impl(i) => &i.attrs,
        syn::Item::Macro(i) => &i.attrs,
        syn::Item::Mod(i) => &i.attrs,
        syn::Item::Static(i) => &i.attrs,
        syn::Item::Struct(i) => &i.attrs,
        syn::Item::Trait(i) => &i.attrs,
        syn::Item::Type(i) => &i.attrs,
        syn::Item::Union(i) => &i.attrs,
        syn::Item::Use(i) => &i.attrs,
        _ => &[],
    }
}

impl<'ast> Visit<'ast> for TestFinder {
    fn visit_item(&mut self, item: &'ast syn::Item) {
        let attributes = attributes_of(item);
        if !self.note(attributes, item.span()) {
            visit::visit_item(self, item);
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        if !self.note(&item.attrs, item.span()) {
            visit::visit_impl_item_fn(self, item);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_test_holds_for_lines_of_test_items_only() {
        let source = Source::parse(
            "fn product() {}\n\
             #[cfg(test)]\nfn helper() {\n}\n\
             #[cfg(all(test, not(loom)))]\nmod tests {\n}\n\
             #[cfg(not(test))]\nfn also_product() {}\n\
             #[cfg(any(test, fuzzing))]\nfn shared() {}\n\
             impl X {\n#[cfg(test)]\nfn peek(&self) {}\nfn kept(&self) {}\n}\n",
        )
        .unwrap();
        let tests: Vec<usize> = (1..=source.lines.len()).filter(|l| source.is_test(*l)).collect();
        assert_eq!(tests, [2, 3, 4, 5, 6, 7, 13, 14]);
    }
}
