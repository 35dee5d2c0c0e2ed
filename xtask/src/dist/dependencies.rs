//! Dependencies of the program: the crates whose code is in it, with their licences and checksums.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use serde::Deserialize;
use taskkit::exec::Cmd;

use crate::product::TARGET;

/// Package of the program.
const PROGRAM: &str = "ringfence";

/// Crate of the program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Component {
    pub(crate) name: String,
    pub(crate) version: String,
    /// Expression of SPDX. `None` if the crate only has a file.
    pub(crate) licence: Option<String>,
    pub(crate) description: Option<String>,
    pub(crate) repository: Option<String>,
    /// SHA-256 of the published archive, in hexadecimal. `None` for a crate of this repository.
    pub(crate) checksum: Option<String>,
    /// Set if the compiler runs the crate: none of its code is in the program.
    pub(crate) is_macro: bool,
    /// Folder of its sources.
    pub(crate) folder: PathBuf,
    /// Dependencies, as indices of the list.
    pub(crate) uses: Vec<usize>,
}

impl Component {
    /// Returns the name as a package URL.
    pub(crate) fn purl(&self) -> String {
        // The only character of a version that a package URL reserves.
        format!("pkg:cargo/{}@{}", self.name, self.version.replace('+', "%2B"))
    }

    /// Returns `true` if the crate is from another project.
    pub(crate) fn is_foreign(&self) -> bool {
        self.checksum.is_some()
    }
}

/// Output of `cargo metadata`.
#[derive(Deserialize)]
struct Metadata {
    packages: Vec<Package>,
    resolve: Resolve,
}

#[derive(Deserialize)]
struct Package {
    id: String,
    name: String,
    version: String,
    license: Option<String>,
    description: Option<String>,
    repository: Option<String>,
    manifest_path: PathBuf,
    targets: Vec<Target>,
}

#[derive(Deserialize)]
struct Target {
    kind: Vec<String>,
}

#[derive(Deserialize)]
struct Resolve {
    nodes: Vec<Node>,
}

#[derive(Deserialize)]
struct Node {
    id: String,
    deps: Vec<Dependency>,
}

#[derive(Deserialize)]
struct Dependency {
    pkg: String,
    dep_kinds: Vec<Kind>,
}

#[derive(Deserialize)]
struct Kind {
    /// `dev` or `build`; `None` for a dependency of the code itself.
    kind: Option<String>,
}

/// Returns the crates of the program, sorted by name and version. The program itself is among them.
pub(crate) fn of_program(root: &Path) -> anyhow::Result<Vec<Component>> {
    let metadata = Cmd::cargo().args([
        "metadata",
        "--format-version=1",
        "--locked",
        "--offline",
        "--filter-platform",
        TARGET,
    ]);
    let metadata = metadata.output(root)?;
    let metadata = metadata.map_err(|message| anyhow::anyhow!("cargo metadata: {message}"))?;
    let lock = std::fs::read_to_string(root.join("Cargo.lock"))?;
    select(&serde_json::from_str(&metadata)?, &lock)
}

fn select(metadata: &Metadata, lock: &str) -> anyhow::Result<Vec<Component>> {
    let checksums = checksums(lock)?;
    let nodes: BTreeMap<&str, &Node> =
        metadata.resolve.nodes.iter().map(|node| (node.id.as_str(), node)).collect();
    let program = metadata.packages.iter().find(|package| package.name == PROGRAM);
    let mut open = vec![program.context("cargo metadata has no program")?.id.as_str()];
    let mut reached = BTreeSet::new();
    while let Some(id) = open.pop() {
        if reached.insert(id) {
            open.extend(code_of(nodes.get(id).copied()));
        }
    }
    let mut packages: Vec<&Package> =
        metadata.packages.iter().filter(|package| reached.contains(package.id.as_str())).collect();
    packages.sort_by(|a, b| (&a.name, &a.version).cmp(&(&b.name, &b.version)));
    let place: BTreeMap<&str, usize> =
        packages.iter().enumerate().map(|(at, package)| (package.id.as_str(), at)).collect();
    let component = |package: &&Package| {
        let uses = code_of(nodes.get(package.id.as_str()).copied());
        let mut uses: Vec<usize> = uses.filter_map(|id| place.get(id).copied()).collect();
        uses.sort_unstable();
        let key = (package.name.clone(), package.version.clone());
        Ok(Component {
            name: package.name.clone(),
            version: package.version.clone(),
            licence: package.license.as_deref().map(expression),
            description: package.description.as_deref().map(|text| text.trim().to_owned()),
            repository: package.repository.clone(),
            checksum: checksums.get(&key).cloned(),
            is_macro: package.targets.iter().any(|t| t.kind.iter().any(|k| k == "proc-macro")),
            folder: package.manifest_path.parent().context("a manifest is in a folder")?.to_owned(),
            uses,
        })
    };
    packages.iter().map(component).collect()
}

/// Iterates over the dependencies of the code of a package.
fn code_of(node: Option<&Node>) -> impl Iterator<Item = &str> {
    let all = node.into_iter().flat_map(|node| &node.deps);
    all.filter(|dependency| dependency.dep_kinds.iter().any(|kind| kind.kind.is_none()))
        .map(|dependency| dependency.pkg.as_str())
}

/// Returns a licence as an expression of SPDX. Older crates separate alternatives by a slash.
fn expression(licence: &str) -> String {
    licence.split('/').map(str::trim).collect::<Vec<_>>().join(" OR ")
}

/// Returns the checksums in a `Cargo.lock`, by name and version.
fn checksums(lock: &str) -> anyhow::Result<BTreeMap<(String, String), String>> {
    #[derive(Deserialize)]
    struct Lock {
        package: Vec<Locked>,
    }
    #[derive(Deserialize)]
    struct Locked {
        name: String,
        version: String,
        checksum: Option<String>,
    }
    let lock: Lock = toml::from_str(lock)?;
    let with_checksum = |locked: Locked| Some(((locked.name, locked.version), locked.checksum?));
    Ok(lock.package.into_iter().filter_map(with_checksum).collect())
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Returns a program with one foreign crate and one macro.
    pub(crate) fn example() -> Vec<Component> {
        let package = |name: &str, license: &str, kind: &str| {
            serde_json::json!({
                "id": name, "name": name, "version": "1.0.0", "license": license,
                "description": " of a test\n", "repository": null,
                "manifest_path": format!("/src/{name}/Cargo.toml"), "targets": [{"kind": [kind]}],
            })
        };
        let uses = |name: &str, kind: Option<&str>| serde_json::json!({"pkg": name, "dep_kinds": [{"kind": kind}]});
        let metadata = serde_json::json!({
            "packages": [
                package("ringfence", "Apache-2.0 OR MIT", "bin"), package("serde", "MIT/Apache-2.0", "lib"),
                package("derive", "MIT", "proc-macro"), package("cc", "MIT", "lib"), package("tempfile", "MIT", "lib"),
            ],
            "resolve": {"nodes": [
                {"id": "ringfence", "deps": [uses("serde", None), uses("tempfile", Some("dev"))]},
                {"id": "serde", "deps": [uses("derive", None), uses("cc", Some("build"))]},
                {"id": "derive", "deps": []}, {"id": "cc", "deps": []}, {"id": "tempfile", "deps": []},
            ]},
        });
        let lock = "[[package]]\nname = \"serde\"\nversion = \"1.0.0\"\nchecksum = \"ab\"\n\
                    [[package]]\nname = \"derive\"\nversion = \"1.0.0\"\nchecksum = \"cd\"\n\
                    [[package]]\nname = \"ringfence\"\nversion = \"1.0.0\"\n";
        select(&serde_json::from_value(metadata).unwrap(), lock).unwrap()
    }

    #[test]
    fn components_are_the_crates_of_the_code_alone() {
        let found = example();
        let names: Vec<&str> = found.iter().map(|component| component.name.as_str()).collect();
        assert_eq!(names, ["derive", "ringfence", "serde"]);
        assert_eq!((found[1].uses.as_slice(), found[2].uses.as_slice()), (&[2][..], &[0][..]));
        assert!(found[0].is_macro && found[0].is_foreign() && !found[1].is_foreign());
        assert_eq!(found[2].licence.as_deref(), Some("MIT OR Apache-2.0"));
        assert_eq!(found[2].purl(), "pkg:cargo/serde@1.0.0");
    }

    #[test]
    fn program_of_the_repository_has_its_crates_and_no_test_tools() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let found = of_program(root).unwrap();
        let has = |name: &str| found.iter().any(|component| component.name == name);
        assert!(has("ringfence") && has("ringfence-uplink") && has("rustix"));
        assert!(!has("proptest") && !has("xtask"));
        assert!(found.iter().all(|component| component.licence.is_some()), "{found:#?}");
    }
}
