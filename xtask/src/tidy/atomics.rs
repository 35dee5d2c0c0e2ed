//! Rule about atomics: only the trusted packages use them, for protocols between domains or threads. There
//! loom checks the protocols. Other packages use a channel, a lock or a single owner; exceptions are listed
//! with their reason.

use std::collections::BTreeMap;

use proc_macro2::{Delimiter, TokenStream, TokenTree};

use super::config::{CONFIG, TRUSTED};
use super::finding::Finding;
use super::tree::Tree;

/// Returns findings for atomics outside the trusted packages and the list.
pub(super) fn check(tree: &Tree, listed: &BTreeMap<String, String>) -> Vec<Finding> {
    let mut findings = vec![];
    let mut used: Vec<&str> = vec![];
    for (path, source) in &tree.sources {
        if TRUSTED.iter().any(|room| path.starts_with(room)) {
            continue;
        }
        let mut lines = vec![];
        scan(source.tokens.clone(), &[], &mut lines);
        lines.retain(|line| !source.is_test(*line));
        let Some(first) = lines.first() else { continue };
        used.push(path);
        if !listed.contains_key(path) {
            let message = format!(
                "uses atomics: hand the state over by a channel, or move the protocol to ring; \
                 if neither serves, list the file with its reason in {CONFIG}"
            );
            findings.push(Finding::at(path, *first, message));
        }
    }
    for path in listed.keys().filter(|path| !used.contains(&path.as_str())) {
        findings.push(Finding::file(CONFIG, format!("{path} uses no atomics: remove the line")));
    }
    findings
}

/// Collects the lines on which the last part of a path into the `sync::atomic` of std, core or loom begins. The
/// path may be written out, or nested in the braces of a `use`.
fn scan(tokens: TokenStream, prefix: &[String], lines: &mut Vec<usize>) {
    let mut path: Vec<String> = prefix.to_vec();
    // Two colons continue a path; every other token ends it.
    let mut colons = 2;
    for token in tokens {
        match &token {
            TokenTree::Punct(mark) if mark.as_char() == ':' => colons += 1,
            TokenTree::Ident(word) => {
                if colons != 2 {
                    path.clear();
                }
                path.push(word.to_string());
                colons = 0;
                if is_atomic_module(&path) {
                    lines.push(word.span().start().line);
                }
            }
            TokenTree::Group(group) => {
                let nested = group.delimiter() == Delimiter::Brace && colons == 2;
                scan(group.stream(), if nested { &path } else { &[] }, lines);
                colons = 0;
            }
            _ => {
                path = prefix.to_vec();
                colons = 2;
            }
        }
    }
}

fn is_atomic_module(path: &[String]) -> bool {
    let [krate, sync, atomic] = path else {
        return false;
    };
    ["std", "core", "loom"].contains(&krate.as_str()) && sync == "sync" && atomic == "atomic"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(krate: &str, text: &str, listed: &[&str]) -> Vec<String> {
        let manifest = format!("crates/{krate}/Cargo.toml");
        let lib = format!("crates/{krate}/src/lib.rs");
        let tree = Tree::from_files([(&*manifest, "[package]\nname = \"x\"\n"), (&*lib, text)]);
        let listed = listed.iter().map(|path| ((*path).to_owned(), "why".to_owned())).collect();
        check(&tree, &listed).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn every_spelling_of_an_atomic_path_is_a_finding() {
        for text in [
            "use std::sync::atomic::AtomicU32;",
            "use core::sync::atomic;",
            "use std::sync::{Arc, atomic::{AtomicBool, Ordering}};",
            "use std::{io, sync::{Mutex, atomic}};",
            "fn f() { let x = ::std::sync::atomic::AtomicU8::new(0); }",
            "m! { (std::sync::atomic::fence(Ordering::SeqCst)) }",
        ] {
            let found = findings("net", text, &[]);
            assert_eq!(found.len(), 1, "{text}");
            assert!(found[0].starts_with("crates/net/src/lib.rs:1: uses atomics"));
        }
    }

    #[test]
    fn similar_text_and_test_code_are_no_findings() {
        for text in [
            "use std::sync::{Arc, Mutex};",
            "use ringfence_ring::sync::atomic::AtomicU32;",
            "// std::sync::atomic\nconst S: &str = \"std::sync::atomic\";",
            "fn f(std: u8) { sync(std, atomic) }",
            "#[cfg(test)] mod tests { use std::sync::atomic::AtomicU32; }",
        ] {
            assert_eq!(findings("net", text, &[]), [] as [&str; 0], "{text}");
        }
    }

    #[test]
    fn trusted_and_listed_files_may_use_atomics_and_stale_line_is_a_finding() {
        let text = "use std::sync::atomic::AtomicU32;";
        assert_eq!(findings("ring", text, &[]), [] as [&str; 0]);
        assert_eq!(findings("net", text, &["crates/net/src/lib.rs"]), [] as [&str; 0]);
        let stale = findings("net", "", &["crates/net/src/lib.rs"]);
        assert!(stale[0].contains("uses no atomics"), "{stale:?}");
    }
}
