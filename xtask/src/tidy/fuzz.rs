//! Rule about fuzz targets: `fuzz/Cargo.toml` lists each, because cargo-fuzz does not build others.

use std::path::Path;

use super::finding::Finding;
use super::tree::Tree;

const MANIFEST: &str = "fuzz/Cargo.toml";
const TARGETS: &str = "fuzz/fuzz_targets/";

/// Returns the names of the fuzz targets in a manifest.
pub(crate) fn fuzz_targets(manifest: &str) -> anyhow::Result<Vec<String>> {
    let names = listed(manifest)?.into_iter().map(|(name, _)| name).collect();
    Ok(names)
}

/// Returns names and paths of the programs in a manifest.
fn listed(manifest: &str) -> Result<Vec<(String, String)>, toml::de::Error> {
    let manifest: toml::Table = manifest.parse()?;
    let programs = manifest.get("bin").and_then(toml::Value::as_array);
    let text = |program: &toml::Value, key| Some(program.get(key)?.as_str()?.to_owned());
    let pair = |program| Some((text(program, "name")?, text(program, "path")?));
    Ok(programs.into_iter().flatten().filter_map(pair).collect())
}

/// Returns findings for targets that are not listed, and for listed targets without a file.
pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let files: Vec<&String> =
        tree.sources.keys().filter(|path| path.starts_with(TARGETS)).collect();
    let Some(manifest) = tree.files.get(MANIFEST) else {
        let orphan = |path: &&String| Finding::file(path, format!("{MANIFEST} is missing"));
        return files.iter().map(orphan).collect();
    };
    let listed = match listed(manifest) {
        Ok(listed) => listed,
        Err(error) => return vec![Finding::file(MANIFEST, error.to_string())],
    };
    let mut findings = vec![];
    for path in &files {
        if !listed.iter().any(|(_, listed)| Path::new("fuzz").join(listed) == Path::new(path)) {
            findings.push(Finding::file(path, format!("is not listed in {MANIFEST}")));
        }
    }
    for (name, path) in &listed {
        if !files.iter().any(|file| Path::new("fuzz").join(path) == Path::new(file)) {
            let message = format!("the fuzz target {name} has no file {path}");
            findings.push(Finding::file(MANIFEST, message));
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    const LISTED: &str = "[package]\nname = \"fuzz\"\n\
         [[bin]]\nname = \"tx\"\npath = \"fuzz_targets/tx.rs\"\n";

    #[test]
    fn fuzz_targets_returns_listed_names() {
        assert_eq!(fuzz_targets(LISTED).unwrap(), ["tx"]);
    }

    #[test]
    fn target_not_listed_and_listed_target_without_file_are_findings() {
        let good = Tree::from_files([(MANIFEST, LISTED), ("fuzz/fuzz_targets/tx.rs", "")]);
        assert_eq!(check(&good), []);
        let bad = Tree::from_files([(MANIFEST, LISTED), ("fuzz/fuzz_targets/rx.rs", "")]);
        let found: Vec<String> = check(&bad).iter().map(ToString::to_string).collect();
        assert_eq!(
            found,
            [
                "fuzz/fuzz_targets/rx.rs: is not listed in fuzz/Cargo.toml",
                "fuzz/Cargo.toml: the fuzz target tx has no file fuzz_targets/tx.rs",
            ]
        );
    }
}
