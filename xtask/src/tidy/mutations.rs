//! Rule about the mutation list: the guard's text of each entry occurs once in its file, and its test exists.

use std::collections::BTreeSet;

use super::finding::Finding;
use super::tree::Tree;
use crate::mutate::{LIST, parse};

/// Returns findings for entries that do not match the sources.
pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let Some(text) = tree.files.get(LIST) else { return vec![] };
    let list = match parse(text) {
        Ok(list) => list,
        Err(error) => return vec![Finding::file(LIST, format!("{error:#}"))],
    };
    let mut findings = vec![];
    let mut names = BTreeSet::new();
    for entry in &list {
        let mut find = |why: String| {
            findings.push(Finding::file(LIST, format!("{}: {why}", entry.name)));
        };
        if !names.insert(&entry.name) {
            find("the name occurs twice".to_owned());
        }
        match tree.files.get(&entry.file).map(|text| text.matches(&entry.from).count()) {
            None => find(format!("there is no {}", entry.file)),
            Some(1) => {}
            Some(count) => find(format!("the guard's text occurs {count} times in {}", entry.file)),
        }
        let test = entry.test.split([' ', ':']).next_back().unwrap_or_default();
        // Programs without the usual harness name their tests in a table.
        let forms = [format!("fn {test}"), format!("\"{test}\"")];
        let is_test = |text: &String| forms.iter().any(|form| text.contains(form));
        if test.is_empty() || !tree.files.values().any(is_test) {
            find(format!("there is no test `{test}`"));
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(from: &str, test: &str) -> String {
        format!(
            "[[mutation]]\nname = \"n\"\nparty = \"p\"\npromise = \"p\"\nfile = \"a.rs\"\n\
             from = \"{from}\"\nto = \"\"\ntest = \"-p a x::{test}\"\n"
        )
    }

    #[test]
    fn entry_whose_guard_or_test_is_gone_is_found() {
        let source = ("a.rs", "fn guard() { check(); }\nfn attack() {}\n");
        let good = list("check();", "attack");
        assert_eq!(check(&Tree::from_files([source, (LIST, &good)])), []);
        for bad in [list("gone();", "attack"), list("check();", "gone"), list("fn ", "attack")] {
            assert_eq!(check(&Tree::from_files([source, (LIST, &bad)])).len(), 1, "{bad}");
        }
        let twice = format!("{good}{good}");
        assert_eq!(check(&Tree::from_files([source, (LIST, &twice)])).len(), 1);
    }
}
