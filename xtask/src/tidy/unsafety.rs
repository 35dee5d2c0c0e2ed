//! Rule about `unsafe`: only the trusted packages use it, each use with a `SAFETY:` comment; all others forbid
//! it. Clippy requires the comment too, but does not check macros.

use proc_macro2::{Delimiter, TokenStream, TokenTree};

use super::config::TRUSTED;
use super::finding::Finding;
use super::modules::{Kind, roots};
use super::tree::{Source, Tree};

/// Returns findings for `unsafe` outside the trusted packages or without its comment, and for roots without the
/// lint.
pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = vec![];
    for (path, source) in &tree.sources {
        let trusted = TRUSTED.iter().any(|room| path.starts_with(room));
        let mut scan = Scan { source, uses: vec![] };
        scan.tokens(source.tokens.clone(), &[]);
        for found in scan.uses {
            if !trusted {
                let trusted = TRUSTED.join(", ");
                let message = format!("`unsafe` is for {trusted} only: move this code there");
                findings.push(Finding::at(path, found.line, message));
            } else if !found.explained {
                let message = "`unsafe` without a `// SAFETY:` comment right above it";
                findings.push(Finding::at(path, found.line, message));
            }
        }
    }
    for root in roots(tree) {
        let trusted = TRUSTED.iter().any(|room| root.path.starts_with(room));
        if root.kind == Kind::Product && !trusted && !forbids_unsafe(&tree.sources[&root.path]) {
            findings.push(Finding::file(&root.path, "the crate lacks #![forbid(unsafe_code)]"));
        }
    }
    findings
}

fn forbids_unsafe(source: &Source) -> bool {
    source.syntax.attrs.iter().any(|attribute| {
        let syn::Meta::List(list) = &attribute.meta else {
            return false;
        };
        list.path.is_ident("forbid") && list.tokens.to_string().contains("unsafe_code")
    })
}

/// Use of the keyword `unsafe`.
struct Use {
    line: usize,
    /// Set if the use has a comment or needs none: an `unsafe fn`, `unsafe trait` or `unsafe extern` states an
    /// obligation in its `# Safety` section and fulfils none.
    explained: bool,
}

/// Visitor that collects the uses of `unsafe` in the tokens of a file, macros included.
struct Scan<'a> {
    source: &'a Source,
    uses: Vec<Use>,
}

impl Scan<'_> {
    /// Scans tokens. `above` has the first lines of the enclosing statements: the comment of a statement also
    /// explains an `unsafe` in its middle.
    fn tokens(&mut self, tokens: TokenStream, above: &[usize]) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let mut begin = None;
        for (i, token) in tokens.iter().enumerate() {
            let line = token.span().start().line;
            let start = *begin.get_or_insert(line);
            match token {
                TokenTree::Group(group) if group.delimiter() == Delimiter::Brace => {
                    // The statements of a block need comments of their own.
                    self.tokens(group.stream(), &[]);
                    begin = None;
                }
                TokenTree::Group(group) => {
                    let mut above = above.to_vec();
                    above.push(start);
                    self.tokens(group.stream(), &above);
                }
                TokenTree::Punct(mark) if matches!(mark.as_char(), ';' | ',') => begin = None,
                TokenTree::Ident(word) if word == "unsafe" => {
                    let mut lines = above.to_vec();
                    lines.extend([start, line]);
                    let explained = states_obligation(tokens.get(i + 1)) || self.explained(&lines);
                    self.uses.push(Use { line, explained });
                }
                _ => {}
            }
        }
    }

    /// Returns `true` if a `SAFETY:` comment is on one of the lines or right above it.
    fn explained(&self, lines: &[usize]) -> bool {
        let text = |line: usize| self.source.lines.get(line.wrapping_sub(1)).map(|l| l.trim());
        lines.iter().any(|line| {
            let same = text(*line).is_some_and(|text| text.contains("SAFETY:"));
            let comments = (1..*line).rev().map_while(text).take_while(|text| {
                ["//", "/*", "*", "#["].iter().any(|start| text.starts_with(start))
            });
            same || comments.into_iter().any(|text| text.contains("SAFETY:"))
        })
    }
}

/// Returns `true` if `unsafe` before this token states an obligation for its callers.
fn states_obligation(next: Option<&TokenTree>) -> bool {
    match next {
        Some(TokenTree::Ident(word)) => word == "fn" || word == "extern" || word == "trait",
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(krate: &str, text: &str) -> Vec<String> {
        let manifest = format!("crates/{krate}/Cargo.toml");
        let lib = format!("crates/{krate}/src/lib.rs");
        let tree = Tree::from_files([(&*manifest, "[package]\nname = \"x\"\n"), (&*lib, text)]);
        check(&tree).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn unsafe_outside_trusted_packages_is_a_finding_even_with_comment() {
        let found = findings(
            "net",
            "#![forbid(unsafe_code)]\nfn f() {\n    // SAFETY: none.\n    unsafe { g() }\n}\n",
        );
        assert_eq!(found.len(), 1);
        assert!(found[0].starts_with("crates/net/src/lib.rs:4: `unsafe` is for"), "{found:?}");
    }

    #[test]
    fn crate_without_forbid_is_a_finding() {
        let found = findings("net", "//! Net. #![forbid(unsafe_code)]\n#![deny(unsafe_code)]\n");
        assert_eq!(found, ["crates/net/src/lib.rs: the crate lacks #![forbid(unsafe_code)]"]);
        assert_eq!(findings("memory", "//! Memory.\n"), [] as [&str; 0]);
    }

    #[test]
    fn safety_comment_above_block_or_statement_is_accepted() {
        let found = findings(
            "ring",
            "fn f() {\n\
             // SAFETY: one.\n\
             unsafe { g() };\n\
             // SAFETY: two,\n// over two lines.\n\
             let x = h(\n1,\nunsafe { g() },\n);\n\
             // SAFETY: three.\n#[allow(clippy::x)]\n\
             let y = unsafe { g() };\n\
             unsafe { g() } // SAFETY: four.\n\
             }\n\
             // SAFETY: five.\n\
             unsafe impl Send for X {}\n\
             /// # Safety\n/// Be careful.\n\
             unsafe fn k() {}\n",
        );
        assert_eq!(found, [] as [&str; 0]);
    }

    #[test]
    fn unsafe_without_comment_is_a_finding_even_in_macro() {
        let found = findings(
            "ring",
            "fn f() {\n\
             // SAFETY: of the first alone.\n\
             let a = unsafe { g() };\n\
             let b = unsafe { g() };\n\
             // A comment.\n\
             go!({ unsafe { g() } });\n\
             }\n\
             unsafe impl Send for X {}\n",
        );
        let lines: Vec<_> = found.iter().map(|f| f.split(':').nth(1).unwrap()).collect();
        assert_eq!(lines, ["4", "6", "8"]);
    }
}
