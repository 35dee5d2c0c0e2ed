//! Rule about sizes: files and functions over the limits are listed with their size, which may only shrink.

use std::collections::BTreeMap;

use syn::visit::{self, Visit};

use super::config::CONFIG;
use super::finding::Finding;
use super::tree::{Source, Tree};

/// Maximum number of lines of a file, with comments and without tests.
const FILE_LINES: usize = 600;
/// Maximum number of lines of a function, from its signature to its closing brace.
const FUNCTION_LINES: usize = 70;

/// Measured file or function: its key in the list, and its position.
struct Measured {
    key: String,
    path: String,
    line: usize,
    lines: usize,
}

/// Returns findings for sizes over the limits that are not listed, and for list entries that do not match.
pub(super) fn check(
    tree: &Tree,
    listed_files: &BTreeMap<String, usize>,
    listed_functions: &BTreeMap<String, usize>,
) -> Vec<Finding> {
    let mut files = vec![];
    let mut functions = vec![];
    for (path, source) in &tree.sources {
        let lines = (1..=source.lines.len()).filter(|line| !source.is_test(*line)).count();
        files.push(Measured { key: path.clone(), path: path.clone(), line: 1, lines });
        let mut meter = Meter { path, source, scope: vec![], found: &mut functions };
        meter.visit_file(&source.syntax);
    }
    let mut findings = ratchet("file", &files, FILE_LINES, listed_files);
    findings.extend(ratchet("function", &functions, FUNCTION_LINES, listed_functions));
    findings
}

fn ratchet(
    what: &str,
    measured: &[Measured],
    limit: usize,
    listed: &BTreeMap<String, usize>,
) -> Vec<Finding> {
    let mut findings = vec![];
    let over: Vec<&Measured> = measured.iter().filter(|m| m.lines > limit).collect();
    for Measured { key, path, line, lines } in &over {
        let message = match listed.get(key) {
            None => format!("the {what} has {lines} lines, the limit is {limit}: split it ({key})"),
            Some(known) if lines > known => {
                format!("the {what} grew from {known} to {lines} lines; it may only shrink ({key})")
            }
            Some(known) if lines < known => {
                format!(
                    "the {what} shrank from {known} to {lines} lines: correct the number in {CONFIG} ({key})"
                )
            }
            Some(_) => continue,
        };
        findings.push(Finding::at(path, *line, message));
    }
    for key in listed.keys().filter(|key| !over.iter().any(|m| m.key == **key)) {
        let message =
            format!("no {what} {key} is over the limit of {limit} lines: remove the line");
        findings.push(Finding::file(CONFIG, message));
    }
    findings
}

/// Visitor that measures the functions of one file.
struct Meter<'a> {
    path: &'a str,
    source: &'a Source,
    scope: Vec<String>,
    found: &'a mut Vec<Measured>,
}

impl Meter<'_> {
    fn measure(&mut self, signature: &syn::Signature, block: &syn::Block) {
        let line = signature.fn_token.span.start().line;
        if self.source.is_test(line) {
            return;
        }
        let lines = block.brace_token.span.close().end().line - line + 1;
        let mut key = vec![self.path.to_owned()];
        key.extend(self.scope.iter().cloned());
        key.push(signature.ident.to_string());
        let path = self.path.to_owned();
        self.found.push(Measured { key: key.join("::"), path, line, lines });
    }

    fn within(&mut self, name: String, walk: impl FnOnce(&mut Self)) {
        self.scope.push(name);
        walk(self);
        self.scope.pop();
    }
}

impl<'ast> Visit<'ast> for Meter<'_> {
    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        self.measure(&item.sig, &item.block);
        self.within(item.sig.ident.to_string(), |s| visit::visit_item_fn(s, item));
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        self.measure(&item.sig, &item.block);
        self.within(item.sig.ident.to_string(), |s| visit::visit_impl_item_fn(s, item));
    }

    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        if let Some(block) = &item.default {
            self.measure(&item.sig, block);
        }
        visit::visit_trait_item_fn(self, item);
    }

    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        self.within(item.ident.to_string(), |s| visit::visit_item_mod(s, item));
    }

    fn visit_item_trait(&mut self, item: &'ast syn::ItemTrait) {
        self.within(item.ident.to_string(), |s| visit::visit_item_trait(s, item));
    }

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        let name = match &*item.self_ty {
            syn::Type::Path(path) => path.path.segments.last().map(|s| s.ident.to_string()),
            _ => None,
        };
        self.within(name.unwrap_or_else(|| "impl".to_owned()), |s| visit::visit_item_impl(s, item));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MANIFEST: (&str, &str) = ("crates/a/Cargo.toml", "[package]\nname = \"a\"\n");
    const LIB: &str = "crates/a/src/lib.rs";

    fn messages(text: &str, files: &[(&str, usize)], functions: &[(&str, usize)]) -> Vec<String> {
        let tree = Tree::from_files([MANIFEST, (LIB, text)]);
        let listed =
            |list: &[(&str, usize)]| list.iter().map(|(k, n)| ((*k).to_owned(), *n)).collect();
        let findings = check(&tree, &listed(files), &listed(functions));
        findings.into_iter().map(|finding| finding.message).collect()
    }

    /// Returns a source with one method of `lines` lines.
    fn method(lines: usize) -> String {
        format!("impl Vif {{\nfn poll(&self) {{\n{}}}\n}}\n", "x();\n".repeat(lines - 2))
    }

    #[test]
    fn function_of_71_lines_is_a_finding_and_of_70_is_not() {
        assert_eq!(messages(&method(70), &[], &[]), [] as [&str; 0]);
        let found = messages(&method(71), &[], &[]);
        assert_eq!(found.len(), 1);
        assert!(found[0].contains("has 71 lines") && found[0].contains("lib.rs::Vif::poll"));
    }

    #[test]
    fn listed_size_that_changes_is_a_finding() {
        let key = "crates/a/src/lib.rs::Vif::poll";
        assert_eq!(messages(&method(80), &[], &[(key, 80)]), [] as [&str; 0]);
        assert!(messages(&method(81), &[], &[(key, 80)])[0].contains("grew from 80 to 81"));
        assert!(messages(&method(79), &[], &[(key, 80)])[0].contains("shrank from 80 to 79"));
        assert!(messages(&method(70), &[], &[(key, 80)])[0].contains("remove the line"));
    }

    #[test]
    fn test_lines_of_file_do_not_count() {
        let tests = format!("#[cfg(test)]\nmod tests {{\n{}}}\n", "// t\n".repeat(500));
        let at_limit = "// x\n".repeat(600);
        assert_eq!(messages(&format!("{at_limit}{tests}"), &[], &[]), [] as [&str; 0]);
        let found = messages(&format!("// y\n{at_limit}{tests}"), &[], &[]);
        assert!(found[0].contains("the file has 601 lines"), "{found:?}");
        assert_eq!(messages(&format!("// y\n{at_limit}"), &[(LIB, 601)], &[]), [] as [&str; 0]);
    }

    #[test]
    fn long_test_function_is_allowed() {
        let long = format!("#[test]\nfn t() {{\n{}}}\n", "x();\n".repeat(200));
        assert_eq!(messages(&long, &[], &[]), [] as [&str; 0]);
    }
}
