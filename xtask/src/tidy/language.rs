//! Rules about language that a program can check: the first word and the length of doc comments, and the words that
//! the glossary replaces.
//!
//! * A doc comment names the item, so it does not begin with one of [`QUESTION_WORDS`].
//! * A doc comment has at least [`WORDS_MIN`] words. Fields, variants and associated constants may have fewer. A
//!   comment on them is optional, because the name often says all.
//! * Names and comments of Rust, shell and C, and pages, avoid the words of [`words`]. String literals are not checked:
//!   names of counters, keys and options are interfaces and do not change for style.
//!
//! Exceptions by file and word are in `xtask/tidy.toml`. [`EXEMPT`] files may use every word.

mod scan;
mod words;

use proc_macro2::{TokenStream, TokenTree};
use syn::visit::{self, Visit};

use super::config::{CONFIG, Words};
use super::finding::Finding;
use super::tree::{Source, Tree, attributes_of};
use scan::Part;
use words::{Kind, Replaced};

/// First words of doc comments that ask a question instead of naming the item.
const QUESTION_WORDS: [&str; 10] =
    ["What", "Who", "Whose", "Whom", "Whether", "How", "Where", "Which", "That", "It"];

/// Minimum number of words of a doc comment that is not optional.
const WORDS_MIN: usize = 4;

/// Files that may use the replaced words, because they explain or check the rule, or record the past.
const EXEMPT: [&str; 5] = [
    words::GLOSSARY,
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "xtask/src/tidy/language.rs",
    "xtask/src/tidy/language/words.rs",
];

/// Returns findings for the language rules.
pub(super) fn check(tree: &Tree, words: &Words) -> Vec<Finding> {
    let mut findings = vec![];
    for (path, source) in &tree.sources {
        for comment in comments_of(source) {
            findings.extend(check_comment(path, &comment));
        }
    }
    findings.extend(words::undecided(tree));
    let mut used = vec![];
    for (path, text) in tree.files.iter().filter(|(path, _)| !EXEMPT.contains(&path.as_str())) {
        for (line, found) in hits(path, text, tree.sources.get(path)) {
            let Replaced { words: word, instead, .. } = found;
            if words.get(path).is_some_and(|allowed| allowed.contains_key(*word)) {
                used.push((path.clone(), (*word).to_owned()));
                continue;
            }
            let message = format!("\"{word}\" is replaced by the glossary: write {instead}");
            findings.push(Finding::at(path, line, message));
        }
    }
    for (path, allowed) in words {
        for word in allowed.keys().filter(|word| !used.contains(&(path.clone(), (*word).clone()))) {
            let message = format!("{path} does not use \"{word}\": remove the exception");
            findings.push(Finding::file(CONFIG, message));
        }
    }
    findings
}

/// Doc comment with its first line. `optional` is set if the item needs no comment.
struct Comment {
    line: usize,
    text: String,
    optional: bool,
}

fn check_comment(path: &str, comment: &Comment) -> Option<Finding> {
    let words: Vec<&str> = comment.text.split_whitespace().collect();
    let first = words.first()?.trim_end_matches(|c: char| !c.is_alphanumeric());
    if QUESTION_WORDS.contains(&first) {
        let message = format!(
            "a doc comment begins with \"{first}\": name the thing, or begin with a verb in the \
             third person"
        );
        return Some(Finding::at(path, comment.line, message));
    }
    if !comment.optional && words.len() < WORDS_MIN {
        let message =
            format!("a doc comment of fewer than {WORDS_MIN} words: say more, or delete it");
        return Some(Finding::at(path, comment.line, message));
    }
    None
}

/// Returns the doc comments of a source, each as one text.
fn comments_of(source: &Source) -> Vec<Comment> {
    let mut docs = Docs::default();
    docs.add_comment(&source.syntax.attrs, false);
    docs.visit_file(&source.syntax);
    docs.found
}

#[derive(Default)]
struct Docs {
    found: Vec<Comment>,
}

impl Docs {
    fn add_comment(&mut self, attributes: &[syn::Attribute], optional: bool) {
        let lines: Vec<(usize, String)> = attributes.iter().filter_map(doc_line).collect();
        if let Some((line, _)) = lines.first() {
            let text = lines.iter().map(|(_, text)| text.as_str()).collect::<Vec<_>>().join("\n");
            self.found.push(Comment { line: *line, text, optional });
        }
    }
}

/// Returns line and text of a `///` or `//!` line, which the parser represents as an attribute.
fn doc_line(attribute: &syn::Attribute) -> Option<(usize, String)> {
    let syn::Meta::NameValue(pair) = &attribute.meta else { return None };
    let syn::Expr::Lit(literal) = &pair.value else { return None };
    let syn::Lit::Str(text) = &literal.lit else { return None };
    let line = attribute.pound_token.spans[0].start().line;
    pair.path.is_ident("doc").then(|| (line, text.value()))
}

impl<'ast> Visit<'ast> for Docs {
    fn visit_attribute(&mut self, _: &'ast syn::Attribute) {}

    fn visit_item(&mut self, item: &'ast syn::Item) {
        let attributes = attributes_of(item);
        let re_export = matches!(item, syn::Item::Use(_));
        self.add_comment(attributes, re_export);
        visit::visit_item(self, item);
    }

    fn visit_impl_item(&mut self, item: &'ast syn::ImplItem) {
        match item {
            syn::ImplItem::Fn(i) => self.add_comment(&i.attrs, false),
            syn::ImplItem::Const(i) => self.add_comment(&i.attrs, true),
            syn::ImplItem::Type(i) => self.add_comment(&i.attrs, true),
            _ => {}
        }
        visit::visit_impl_item(self, item);
    }

    fn visit_trait_item(&mut self, item: &'ast syn::TraitItem) {
        match item {
            syn::TraitItem::Fn(i) => self.add_comment(&i.attrs, false),
            syn::TraitItem::Const(i) => self.add_comment(&i.attrs, true),
            syn::TraitItem::Type(i) => self.add_comment(&i.attrs, true),
            _ => {}
        }
        visit::visit_trait_item(self, item);
    }

    fn visit_field(&mut self, field: &'ast syn::Field) {
        self.add_comment(&field.attrs, true);
    }

    fn visit_variant(&mut self, variant: &'ast syn::Variant) {
        self.add_comment(&variant.attrs, true);
        visit::visit_variant(self, variant);
    }
}

/// Replaced word and the line of its use.
type Hit = (usize, &'static Replaced);

/// Returns the replaced words of a file: of all lines of a page, of the names and comments of a source.
fn hits(path: &str, text: &str, source: Option<&Source>) -> Vec<Hit> {
    let mut hits = Hits { path, found: vec![] };
    if let Some(source) = source {
        hits.add_source(source);
    } else if path.ends_with(".md") {
        text.lines().enumerate().for_each(|(i, line)| hits.add_prose(i + 1, line));
    } else if scan::is_shell(path, text) {
        hits.add_parts(scan::shell(text));
    } else if scan::is_c(path) {
        hits.add_parts(scan::c(text));
    }
    hits.found
}

/// Collector of the replaced words of one file.
struct Hits<'a> {
    path: &'a str,
    found: Vec<Hit>,
}

impl Hits<'_> {
    fn add_name(&mut self, line: usize, name: &str) {
        let found = words::find(self.path, Kind::Name, name).into_iter();
        self.found.extend(found.map(|replaced| (line, replaced)));
    }

    /// Adds the words in a line of prose. Text in backticks is a name, which is not checked; nor is a line that cites an
    /// RFC, because it may quote a field name.
    fn add_prose(&mut self, line: usize, text: &str) {
        if text.contains("RFC") {
            return;
        }
        for prose in text.split('`').step_by(2) {
            let found = words::find(self.path, Kind::Prose, prose).into_iter();
            self.found.extend(found.map(|replaced| (line, replaced)));
        }
    }

    fn add_parts(&mut self, parts: Vec<Part>) {
        for part in parts {
            match part {
                Part::Name(line, name) => self.add_name(line, &name),
                Part::Comment(line, text) => self.add_prose(line, &text),
            }
        }
    }

    fn add_source(&mut self, source: &Source) {
        self.add_identifiers(source.tokens.clone());
        for (i, line) in source.lines.iter().enumerate() {
            let Some(at) = line.find("//") else { continue };
            // A comment begins a line, or follows code after a blank; `//` in a literal does neither.
            if line[..at].trim().is_empty() || line[..at].ends_with(' ') {
                self.add_prose(i + 1, &line[at..]);
            }
        }
    }

    fn add_identifiers(&mut self, tokens: TokenStream) {
        for token in tokens {
            match token {
                // `octets` alone is a method of IP addresses in std.
                TokenTree::Ident(name) if name == "octets" => {}
                TokenTree::Ident(name) => {
                    self.add_name(name.span().start().line, &name.to_string());
                }
                TokenTree::Group(group) => self.add_identifiers(group.stream()),
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn findings(text: &str, words: &[(&str, &str)]) -> Vec<String> {
        let manifest = ("crates/x/Cargo.toml", "[package]\nname = \"x\"\n");
        let tree = Tree::from_files([manifest, ("crates/x/src/lib.rs", text)]);
        let allowed = words.iter().map(|(path, word)| {
            ((*path).to_owned(), BTreeMap::from([((*word).to_owned(), "why".to_owned())]))
        });
        check(&tree, &allowed.collect()).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn doc_comment_that_begins_with_a_question_word_is_a_finding() {
        for text in [
            "//! What this crate does for its users.\n",
            "/// Whether it was sent by now.\nfn f() {}\n",
            "struct S {\n/// Which one of them.\na: u8 }\n",
            "impl S {\n/// It returns the whole thing.\nfn f() {} }\n",
            "#[cfg(test)] mod tests {\n/// How it is called.\nfn f() {} }\n",
        ] {
            let found = findings(text, &[]);
            assert_eq!(found.len(), 1, "{text} {found:?}");
            assert!(found[0].contains("begins with"), "{found:?}");
        }
    }

    #[test]
    fn continuation_line_and_later_sentence_may_begin_with_any_word() {
        let text =
            "/// Returns the port of a frame.\n/// Which one depends on the flow.\nfn f() {}\n";
        assert_eq!(findings(text, &[]), [] as [&str; 0]);
    }

    #[test]
    fn short_doc_comment_is_a_finding_except_on_fields_and_variants() {
        let found = findings("/// The port.\nfn f() {}\n", &[]);
        assert!(found[0].starts_with("crates/x/src/lib.rs:1: a doc comment of fewer"), "{found:?}");
        let optional = "/// Kinds of a port here.\nenum E {\n/// A vif.\nA }\nstruct S {\n/// Bytes.\na: u8 }\n";
        assert_eq!(findings(optional, &[]), [] as [&str; 0]);
    }

    #[test]
    fn replaced_word_is_found_in_names_and_comments_and_not_in_literals() {
        for text in [
            "fn tx_parcel() {}\n",
            "struct TxParcels;\n",
            "// A rogue was squeezed out.\nfn f() {}\n",
            "macro_rules! m { ($x:tt) => { let keeper = 1; } }\n",
        ] {
            assert_ne!(findings(text, &[]), [] as [&str; 0], "{text}");
        }
        for text in [
            "fn dataplanes() { let seats_free = \"keeper\"; }\n"
                .replace("seats_free", "free")
                .as_str(),
            "// RFC 791 calls it an octet.\nfn f() {}\n",
            "// The counter `device_condemned` of old.\nfn f() {}\n",
        ] {
            assert_eq!(findings(text, &[]), [] as [&str; 0], "{text}");
        }
    }

    #[test]
    fn replaced_word_is_found_in_shell_and_c_and_not_in_quotes() {
        let found = |path: &str, text: &str| {
            let found = check(&Tree::from_files([(path, text)]), &Words::new());
            found.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        for (path, text) in [
            ("vm/a.sh", "#!/bin/sh\nrogue=1\n"),
            ("vm/init", "#!/bin/sh\ncall rogue x\n"),
            ("dist/a.sh", "\n# A rogue guest.\n"),
            ("linux/a.c", "\nint tx_parcel;\n"),
            ("xen/a.h", "/* One\n * rogue. */\n"),
        ] {
            let found = found(path, text);
            assert_eq!(found.len(), 1, "{path} {found:?}");
            assert!(found[0].starts_with(&format!("{path}:2: ")), "{found:?}");
        }
        for (path, text) in [
            ("vm/a.sh", "echo 'the rogue' \"a seat\"\n"),
            ("linux/a.c", "f(\"rogue\"); /* the field `octet` */\n"),
            ("vm/a.py", "rogue = 1\n"),
        ] {
            assert_eq!(found(path, text), [] as [&str; 0]);
        }
    }

    #[test]
    fn listed_word_is_allowed_until_it_is_gone() {
        let path = "crates/x/src/lib.rs";
        assert_eq!(findings("fn keeper() {}\n", &[(path, "keeper")]), [] as [&str; 0]);
        let stale = findings("fn f() {}\n", &[(path, "keeper")]);
        assert!(stale[0].contains("remove the exception"), "{stale:?}");
    }
}
