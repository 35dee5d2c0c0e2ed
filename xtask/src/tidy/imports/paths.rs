//! Paths that a file writes, and the names that its modules bring into scope.
//!
//! One visitor walks a file. It adds a [`Module`] for the file and for each module written inside it. Tokens of macros,
//! definitions of macros included, and of attributes are searched for paths, because the parser does not know their
//! syntax. Paths in strings count in attributes of serde only.
//!
//! Lines that only tests compile are left out.

use std::collections::BTreeSet;

use proc_macro2::{Delimiter, Span, TokenStream, TokenTree};
use syn::visit::{self, Visit};

use crate::tidy::tree::Source;

/// Words of a path, in the order in which they are written. The last may be the name of an item.
pub(super) type Words = Vec<String>;

/// Attributes whose arguments name no items.
const PLAIN_ATTRIBUTES: [&str; 6] = ["allow", "cfg", "deny", "doc", "expect", "path"];

/// Paths and names of one module: a file, or a module that is written inside a file.
#[derive(Default)]
pub(super) struct Module {
    /// Absolute path of the module in its crate.
    pub(super) path: Words,
    /// Modules that this one declares, by `mod x;` or `mod x { ... }`.
    pub(super) children: BTreeSet<String>,
    /// Names that `use` declarations bring into scope, with their paths.
    pub(super) names: Vec<(String, Words)>,
    /// Modules whose names a `use x::*` brings into scope.
    pub(super) globs: Vec<Words>,
    /// Paths in the module: those of its `use` declarations, and all others of two or more words.
    pub(super) paths: Vec<Words>,
}

/// Returns the modules of a file that is the module `path` of its crate.
pub(super) fn modules(source: &Source, path: &[String]) -> Vec<Module> {
    let file = Module { path: path.to_vec(), ..Module::default() };
    let mut finder = Finder { source, modules: vec![file], current: 0 };
    finder.visit_file(&source.syntax);
    finder.modules
}

struct Finder<'a> {
    source: &'a Source,
    modules: Vec<Module>,
    /// Index of the module that is being walked.
    current: usize,
}

impl Finder<'_> {
    fn module(&mut self) -> &mut Module {
        &mut self.modules[self.current]
    }

    fn add(&mut self, at: Span, words: Words) {
        if !self.source.is_test(at.start().line) {
            self.module().paths.push(words);
        }
    }

    /// Adds the paths of a tree below `prefix`.
    fn add_use(&mut self, tree: &syn::UseTree, prefix: &Words) {
        let with = |name: &syn::Ident| {
            // `use x::{self, y}` names x.
            let own = (name != "self" || prefix.is_empty()).then(|| plain(name));
            [&prefix[..], own.as_slice()].concat()
        };
        match tree {
            syn::UseTree::Path(path) => self.add_use(&path.tree, &with(&path.ident)),
            syn::UseTree::Name(name) => {
                let words = with(&name.ident);
                let bound = words.last().cloned().unwrap_or_default();
                self.module().names.push((bound, words.clone()));
                self.module().paths.push(words);
            }
            syn::UseTree::Rename(renamed) => {
                let words = with(&renamed.ident);
                self.module().names.push((plain(&renamed.rename), words.clone()));
                self.module().paths.push(words);
            }
            syn::UseTree::Glob(_) => {
                self.module().globs.push(prefix.clone());
                self.module().paths.push(prefix.clone());
            }
            syn::UseTree::Group(group) => {
                group.items.iter().for_each(|tree| self.add_use(tree, prefix));
            }
        }
    }

    /// Adds each path of two or more words in `tokens`, and the groups of `use` declarations below `prefix`.
    fn scan(&mut self, tokens: TokenStream, prefix: &[String]) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let mut at = 0;
        while let Some(token) = tokens.get(at) {
            match token {
                TokenTree::Group(group) => self.scan(group.stream(), &[]),
                TokenTree::Ident(first) if begins(first, &tokens[..at]) => {
                    let (mut words, span) = ([prefix, &[plain(first)]].concat(), first.span());
                    while is_separator(&tokens[at + 1..])
                        && let Some(TokenTree::Ident(next)) = tokens.get(at + 3)
                    {
                        words.push(plain(next));
                        at += 3;
                    }
                    if is_separator(&tokens[at + 1..])
                        && let Some(TokenTree::Group(group)) = tokens.get(at + 3)
                        && group.delimiter() == Delimiter::Brace
                    {
                        self.scan(group.stream(), &words);
                        at += 3;
                    }
                    if words.len() > 1 {
                        self.add(span, words);
                    }
                }
                _ => {}
            }
            at += 1;
        }
    }

    /// Adds the paths in the strings of an attribute of serde, such as `deserialize_with = "values::port"`.
    fn scan_strings(&mut self, tokens: TokenStream) {
        for token in tokens {
            if let TokenTree::Literal(literal) = token
                && let syn::Lit::Str(text) = syn::Lit::new(literal)
                && let Ok(inner) = text.parse::<TokenStream>()
            {
                self.scan(inner, &[]);
            }
        }
    }
}

/// Returns the word of an identifier, without `r#`.
fn plain(name: &syn::Ident) -> String {
    let name = name.to_string();
    name.strip_prefix("r#").map(str::to_owned).unwrap_or(name)
}

/// Returns `true` if tokens begin with `::`.
fn is_separator(tokens: &[TokenTree]) -> bool {
    let colon = |token: Option<&TokenTree>| matches!(token, Some(TokenTree::Punct(punct)) if punct.as_char() == ':');
    colon(tokens.first()) && colon(tokens.get(1))
}

/// Returns `true` if `word` after these tokens begins a path: unless it is a field, a method, a parameter of a macro, a
/// lifetime, or a word of a path that begins with a crate (`::x`) or in brackets (`<T>::x`).
fn begins(word: &proc_macro2::Ident, before: &[TokenTree]) -> bool {
    let Some(TokenTree::Punct(last)) = before.last() else { return true };
    let follows = |c: char| {
        let earlier = before.iter().rev().nth(1);
        matches!(earlier, Some(TokenTree::Punct(punct)) if punct.as_char() == c)
    };
    match last.as_char() {
        '$' => word == "crate",
        '.' => follows('.'),
        ':' => !follows(':'),
        '\'' => false,
        _ => true,
    }
}

impl<'ast> Visit<'ast> for Finder<'_> {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if self.source.is_test(item.ident.span().start().line) {
            return;
        }
        let name = plain(&item.ident);
        self.module().children.insert(name.clone());
        if item.content.is_some() {
            let path = [&self.module().path[..], &[name]].concat();
            let outer = std::mem::replace(&mut self.current, self.modules.len());
            self.modules.push(Module { path, ..Module::default() });
            visit::visit_item_mod(self, item);
            self.current = outer;
        }
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        let line = item.use_token.span.start().line;
        if item.leading_colon.is_none() && !self.source.is_test(line) {
            self.add_use(&item.tree, &vec![]);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.leading_colon.is_none() && path.segments.len() > 1 {
            let words = path.segments.iter().map(|segment| plain(&segment.ident)).collect();
            self.add(path.segments[0].ident.span(), words);
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, mac: &'ast syn::Macro) {
        self.visit_path(&mac.path);
        self.scan(mac.tokens.clone(), &[]);
    }

    fn visit_attribute(&mut self, attribute: &'ast syn::Attribute) {
        if PLAIN_ATTRIBUTES.iter().any(|plain| attribute.path().is_ident(plain)) {
            return;
        }
        self.visit_path(attribute.path());
        match &attribute.meta {
            syn::Meta::List(list) => {
                self.scan(list.tokens.clone(), &[]);
                if attribute.path().is_ident("serde") {
                    self.scan_strings(list.tokens.clone());
                }
            }
            syn::Meta::NameValue(pair) => self.visit_expr(&pair.value),
            syn::Meta::Path(_) => {}
        }
    }

    /// Skips `pub(super)` and `pub(in a::b)`, which name a module without using it.
    fn visit_vis_restricted(&mut self, _: &'ast syn::VisRestricted) {}
}
