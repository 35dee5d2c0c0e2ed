//! Rule about floors: a package uses only packages below it.
//!
//! The picture of the packages in `ARCHITECTURE.md` defines the floors, so it is always up to date. It is the
//! code block after the line [`MARK`]. A package stands at the beginning of a line, or after three or more
//! blanks; all other text is explanation. Packages may use those in lower lines, but not those in the same line.

use std::collections::BTreeMap;

use super::finding::Finding;
use super::tree::Tree;

/// Page that contains the picture.
const PAGE: &str = "ARCHITECTURE.md";
/// Line before the picture.
const MARK: &str = "<!-- crates: this picture defines the floors that tidy checks -->";

/// Returns findings for packages that the picture lacks, and for dependencies that do not lead downwards.
/// Development and build dependencies count.
pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let manifests = manifests(tree);
    if manifests.is_empty() {
        return vec![];
    }
    let Some(page) = tree.files.get(PAGE) else {
        return vec![Finding::file(PAGE, "is missing: it shows the crates")];
    };
    let picture = picture(page, &manifests);
    let mut findings = vec![];
    for (name, manifest) in &manifests {
        let Some(own) = picture.get(name.as_str()) else {
            let message = format!("the picture of the crates lacks {name} ({})", manifest.path);
            findings.push(Finding::file(PAGE, message));
            continue;
        };
        for used in &manifest.uses {
            let Some(other) = picture.get(used.as_str()) else { continue };
            if other <= own {
                let message = format!(
                    "{name} uses {used}, which {PAGE} does not show below it: reverse the \
                     dependency, or move the shared part down"
                );
                findings.push(Finding::file(&manifest.path, message));
            }
        }
    }
    findings
}

/// Manifest of a package in the workspace.
struct Manifest {
    path: String,
    /// Directories of the workspace's packages in all dependency tables of the manifest.
    uses: Vec<String>,
}

/// Returns the manifests of `crates/` and `tools/` by the name of their directory.
fn manifests(tree: &Tree) -> BTreeMap<String, Manifest> {
    let mut packages = BTreeMap::new();
    let mut tables = vec![];
    for (path, text) in &tree.files {
        let Some(folder) = path
            .strip_suffix("/Cargo.toml")
            .and_then(|path| path.strip_prefix("crates/").or(path.strip_prefix("tools/")))
            .filter(|folder| !folder.contains('/'))
        else {
            continue;
        };
        // Cargo itself reports a manifest that does not parse.
        let Ok(table) = text.parse::<toml::Table>() else { continue };
        let name = table.get("package").and_then(|p| p.get("name")).and_then(toml::Value::as_str);
        packages.insert(name.unwrap_or(folder).to_owned(), folder.to_owned());
        tables.push((folder.to_owned(), path.clone(), table));
    }
    let mut manifests = BTreeMap::new();
    for (folder, path, table) in tables {
        let mut uses = vec![];
        dependencies(&table, &mut uses);
        let uses = uses.iter().filter_map(|name| packages.get(name)).cloned();
        let uses = uses.filter(|used| *used != folder).collect();
        manifests.insert(folder, Manifest { path, uses });
    }
    manifests
}

/// Adds the names in every dependency table, of any kind and target.
fn dependencies(table: &toml::Table, names: &mut Vec<String>) {
    for (key, value) in table.iter().filter_map(|(key, value)| Some((key, value.as_table()?))) {
        if key.ends_with("dependencies") {
            names.extend(value.keys().cloned());
        } else {
            dependencies(value, names);
        }
    }
}

/// Returns the line of each package in the picture.
fn picture<'a>(page: &str, manifests: &'a BTreeMap<String, Manifest>) -> BTreeMap<&'a str, usize> {
    let mut lines = page.lines().skip_while(|line| line.trim() != MARK).skip(2);
    let mut found = BTreeMap::new();
    for (number, line) in lines.by_ref().take_while(|line| !line.starts_with("```")).enumerate() {
        for entry in line.split("   ").map(str::trim).filter(|entry| !entry.is_empty()) {
            let name = entry.split_whitespace().next().unwrap_or_default();
            let name = name.strip_prefix("tools/").unwrap_or(name);
            if let Some((name, _)) = manifests.get_key_value(name) {
                found.entry(name.as_str()).or_insert(number);
            }
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(picture: &str, top: &str) -> Vec<String> {
        let page = format!("# A\n\n{MARK}\n```text\n{picture}\n```\n");
        let top = format!("[package]\nname = \"r-top\"\n{top}");
        let tree = Tree::from_files([
            ("ARCHITECTURE.md", page.as_str()),
            ("crates/top/Cargo.toml", top.as_str()),
            ("crates/mid/Cargo.toml", "[package]\nname = \"r-mid\"\n"),
            ("tools/low/Cargo.toml", "[package]\nname = \"r-low\"\n"),
        ]);
        check(&tree).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn dependency_downwards_is_allowed() {
        let uses = "[dependencies]\nr-mid = \"1\"\n[dev-dependencies]\nr-low = \"1\"\n";
        assert_eq!(findings(" top   the top\n ───\n mid   a mid   low", uses), [] as [&str; 0]);
    }

    #[test]
    fn dependency_upwards_or_sideways_is_a_finding_of_its_manifest() {
        for picture in [" mid\n top\n low", " top   text   mid\n low"] {
            let found = findings(picture, "[target.'cfg(loom)'.dev-dependencies]\nr-mid = \"1\"\n");
            assert_eq!(found.len(), 1, "{picture} {found:?}");
            assert!(found[0].starts_with("crates/top/Cargo.toml: top uses mid"), "{found:?}");
        }
    }

    #[test]
    fn crate_that_the_picture_lacks_is_a_finding_of_the_page() {
        let found = findings(" top\n mid", "");
        assert_eq!(found.len(), 1, "{found:?}");
        assert!(found[0].contains("lacks low (tools/low/Cargo.toml)"), "{found:?}");
    }
}
