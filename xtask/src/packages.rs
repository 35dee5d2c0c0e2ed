//! Structure of the workspace: target directory, packages, integration tests, dependencies.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use anyhow::Context as _;

/// Folder of the package with the `ringfence` command, relative to the root.
pub(crate) const PRODUCT: &str = "crates/ringfence";

/// Returns cargo's target directory for the repository at `root`.
pub(crate) fn target_directory(root: &Path) -> anyhow::Result<PathBuf> {
    match std::env::var_os("CARGO_TARGET_DIR") {
        // Cargo resolves a relative path in the directory in which it was called.
        Some(directory) => std::path::absolute(directory).context("CARGO_TARGET_DIR"),
        None => Ok(root.join("target")),
    }
}

/// Returns the directories of all packages in `crates` and `tools`.
pub(crate) fn crates(root: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut folders = vec![];
    for parent in ["crates", "tools"].map(|parent| root.join(parent)).iter().filter(|p| p.is_dir())
    {
        for entry in std::fs::read_dir(parent)? {
            let folder = entry?.path();
            if folder.join("Cargo.toml").is_file() {
                folders.push(folder);
            }
        }
    }
    folders.sort();
    Ok(folders)
}

/// Returns the names of a package's integration tests.
pub(crate) fn integration_tests(krate: &Path) -> anyhow::Result<Vec<OsString>> {
    let folder = krate.join("tests");
    if !folder.is_dir() {
        return Ok(vec![]);
    }
    let mut names = vec![];
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let is_test = path.extension().is_some_and(|e| e == "rs") || path.join("main.rs").is_file();
        if let Some(name) = path.file_stem().filter(|_| is_test) {
            names.push(name.to_owned());
        }
    }
    names.sort();
    Ok(names)
}

/// Returns the name of the package in a manifest.
pub(crate) fn package_name(manifest: &str) -> anyhow::Result<String> {
    let manifest: toml::Table = manifest.parse()?;
    let name = manifest.get("package").and_then(|package| package.get("name"));
    Ok(name.and_then(toml::Value::as_str).context("a manifest without a package name")?.to_owned())
}

/// Returns the names of the packages that are published: those in `crates`.
pub(crate) fn published(root: &Path) -> anyhow::Result<Vec<String>> {
    let is_product = |folder: &PathBuf| folder.starts_with(root.join("crates"));
    let manifests = crates(root)?.into_iter().filter(is_product);
    let read = |folder: PathBuf| package_name(&std::fs::read_to_string(folder.join("Cargo.toml"))?);
    manifests.map(read).collect()
}

/// Returns `true` if a manifest names the dependency `name`, of any kind and for any target.
pub(crate) fn depends_on(manifest: &str, name: &str) -> anyhow::Result<bool> {
    fn search(table: &toml::Table, name: &str) -> bool {
        table.iter().filter_map(|(key, value)| Some((key, value.as_table()?))).any(
            |(key, value)| {
                if key.ends_with("dependencies") {
                    value.contains_key(name)
                } else {
                    search(value, name)
                }
            },
        )
    }
    Ok(search(&manifest.parse()?, name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_crate_has_what_crates_io_and_docs_rs_show() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        assert!(published(root).unwrap().contains(&"ringfence".to_owned()));
        for folder in crates(root).unwrap() {
            let manifest = std::fs::read_to_string(folder.join("Cargo.toml")).unwrap();
            let manifest: toml::Table = manifest.parse().unwrap();
            let package = manifest["package"].as_table().unwrap();
            let name = folder.display();
            if !folder.starts_with(root.join("crates")) {
                let is_private = package.get("publish").and_then(toml::Value::as_bool);
                assert_eq!(is_private, Some(false), "{name}");
                continue;
            }
            let readme = package.get("readme").and_then(toml::Value::as_str);
            assert!(folder.join(readme.unwrap()).is_file(), "{name}");
            for list in ["keywords", "categories"] {
                let words = package.get(list).and_then(toml::Value::as_array);
                let words = words.unwrap_or_else(|| panic!("{name} has no {list}"));
                assert!((1..=5).contains(&words.len()), "{name}: {list}");
                // The index refuses longer ones.
                let is_short = |word: &toml::Value| word.as_str().is_some_and(|w| w.len() <= 20);
                assert!(list == "categories" || words.iter().all(is_short), "{name}: {list}");
            }
            let docs = package.get("metadata").and_then(|metadata| metadata.get("docs")?.get("rs"));
            assert!(docs.and_then(|docs| docs.get("targets")).is_some(), "{name}");
        }
    }

    #[test]
    fn dependency_of_target_table_is_found() {
        let manifest =
            "[package]\nname = \"r\"\n[target.'cfg(loom)'.dev-dependencies]\nloom = \"0.7\"\n";
        assert!(depends_on(manifest, "loom").unwrap());
        assert!(
            !depends_on("[dependencies]\nloomlike = \"1\"\n[lints]\nloom = {}\n", "loom").unwrap()
        );
        assert_eq!(package_name(manifest).unwrap(), "r");
    }
}
