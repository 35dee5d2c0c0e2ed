//! Rules about the mutation list: the guard's text of each entry occurs once in its file, its test exists, and the threat model
//! names only entries that exist.

use std::collections::BTreeSet;

use super::finding::Finding;
use super::tree::Tree;
use crate::mutate::{LIST, parse};

/// Page with a table whose last column names entries.
const THREAT_MODEL: &str = "docs/threat-model.md";
/// Head of that column.
const COLUMN: &str = "| mutation |";

/// Returns findings for entries that do not match the sources, and for names without an entry.
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
        // Programs without the usual harness name their tests in a table, some with their module.
        let forms = [format!("fn {test}"), format!("\"{test}\""), format!("::{test}\"")];
        let is_test = |(path, text): (&String, &String)| {
            path.ends_with(".rs") && forms.iter().any(|form| text.contains(form))
        };
        if test.is_empty() || !tree.files.iter().any(is_test) {
            find(format!("there is no test `{test}`"));
        }
    }
    let page = tree.files.get(THREAT_MODEL).map_or("", String::as_str);
    let unknown = named(page).filter(|name| !list.iter().any(|entry| entry.name == *name));
    findings.extend(
        unknown.map(|name| Finding::file(THREAT_MODEL, format!("there is no mutation `{name}`"))),
    );
    findings
}

/// Returns the names in the last cell of each row below a head with [`COLUMN`].
fn named(page: &str) -> impl Iterator<Item = &str> {
    let tables = page
        .split("\n\n")
        .filter(|part| part.lines().next().is_some_and(|head| head.trim_end().ends_with(COLUMN)));
    let rows = tables.flat_map(|table| table.lines().skip(2));
    let cells = rows.filter_map(|row| row.trim_end().strip_suffix('|')?.rsplit('|').next());
    cells.flat_map(|cell| cell.split('`').skip(1).step_by(2))
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
        let table = ("b.rs", "const TESTS: &[&str] = &[\"module::in_table\"];\n");
        let listed = list("check();", "in_table");
        assert_eq!(check(&Tree::from_files([source, table, (LIST, &listed)])), []);
        for (name, findings) in [("n", 0), ("gone", 1)] {
            let page = format!("| kind | mutation |\n|---|---|\n| a `b` | `{name}` |\n\n`c` |\n");
            let tree = Tree::from_files([source, (LIST, &good), (THREAT_MODEL, &page)]);
            assert_eq!(check(&tree).len(), findings, "{name}");
        }
        let twice = format!("{good}{good}");
        assert_eq!(check(&Tree::from_files([source, (LIST, &twice)])).len(), 1);
    }
}
