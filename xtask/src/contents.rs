//! Files that every package and archive of the program has beside it.

use std::path::Path;

use anyhow::Context as _;
use taskkit::exec::Cmd;
use taskkit::tree::Tree;

/// Names that programs use, each of which is a link to `ringfence` in a directory of its own.
pub(crate) const NAMES: &[&str] = &["pasta", "passt", "pesto", "slirp4netns"];

/// Profiles of AppArmor in `dist/apparmor`. The script `apparmor-profiles` puts them into `/etc/apparmor.d`.
pub(crate) const PROFILES: &[&str] =
    &["ringfence", "ringfence-passt", "ringfence-pasta", "ringfence-serve"];

/// Files of `dist` for daemons, with their places in a system and their modes.
pub(crate) const SYSTEM_FILES: &[(&str, &str, u32)] = &[
    ("pasta-alternatives", "usr/share/ringfence/pasta-alternatives", 0o755),
    ("vif-ringfence", "etc/xen/scripts/vif-ringfence", 0o755),
    ("block-ringfence", "etc/xen/scripts/block-ringfence", 0o755),
    ("ringfence.toml", "etc/ringfence/ringfence.toml", 0o644),
    ("ringfence-serve.service", "usr/lib/systemd/system/ringfence-serve.service", 0o644),
    (
        "ringfence-vhost-user-net@.service",
        "usr/lib/systemd/system/ringfence-vhost-user-net@.service",
        0o644,
    ),
    (
        "ringfence-vhost-user-blk@.service",
        "usr/lib/systemd/system/ringfence-vhost-user-blk@.service",
        0o644,
    ),
    ("ringfence-shield@.service", "usr/lib/systemd/system/ringfence-shield@.service", 0o644),
];

/// Adds the files that the program itself prints: manual pages and completions. `share` is the tree's `/usr/share`.
pub(crate) fn add_generated(tree: &Tree, share: &str, program: &Path) -> anyhow::Result<()> {
    let pages = tree.place(&format!("{share}/man/man1/page"))?;
    let manual = pages.ancestors().nth(2).context("the manual is in a directory")?.to_owned();
    let print = |words: &[&str]| {
        let output = Cmd::new(program).args(words.iter().copied()).output(&manual)?;
        output.map_err(|message| anyhow::anyhow!("{}: {message}", words.join(" ")))
    };
    print(&["man", "--install", manual.to_str().context("the directory's name is not text")?])?;
    let folder = pages.parent().context("a page is in a directory")?;
    for page in std::fs::read_dir(folder)? {
        tree.compress(&page?.path())?;
    }
    for (shell, path) in [
        ("bash", "bash-completion/completions/ringfence"),
        ("zsh", "zsh/vendor-completions/_ringfence"),
        ("fish", "fish/vendor_completions.d/ringfence.fish"),
    ] {
        tree.add(&format!("{share}/{path}"), 0o644, print(&["completions", shell])?)?;
    }
    Ok(())
}

/// Adds README, changelog and guides with their pictures.
pub(crate) fn add_guides(tree: &Tree, share: &str, root: &Path) -> anyhow::Result<()> {
    let doc = format!("{share}/doc/ringfence");
    for name in ["README.md", "CHANGELOG.md", "SECURITY.md"] {
        tree.copy(&format!("{doc}/{name}"), 0o644, &root.join(name))?;
    }
    for folder in ["docs", "docs/lab", "docs/perf", "docs/perf/charts", "docs/pictures"] {
        for entry in std::fs::read_dir(root.join(folder))? {
            let path = entry?.path();
            let is_shown = [".md", ".svg", ".html"];
            let name = path.file_name().and_then(|name| name.to_str());
            if let Some(name) = name.filter(|name| is_shown.iter().any(|end| name.ends_with(end))) {
                tree.copy(&format!("{doc}/{folder}/{name}"), 0o644, &path)?;
            }
        }
    }
    Ok(())
}

/// Adds the profiles of AppArmor and the script that installs them.
pub(crate) fn add_profiles(tree: &Tree, share: &str, root: &Path) -> anyhow::Result<()> {
    let (own, dist) = (format!("{share}/ringfence"), root.join("dist"));
    let script = "apparmor-profiles";
    tree.copy(&format!("{own}/{script}"), 0o755, &dist.join(script))?;
    for profile in PROFILES {
        let from = dist.join("apparmor").join(profile);
        tree.copy(&format!("{own}/apparmor/{profile}"), 0o644, &from)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn profiles_of_the_repository_are_all_packed() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let folder = tempfile::tempdir().unwrap();
        let tree = Tree::new(folder.path().join("tree")).unwrap();
        add_profiles(&tree, "share", root).unwrap();
        let packed = tree.files().unwrap().len() - 1;
        let present = std::fs::read_dir(root.join("dist/apparmor")).unwrap().count();
        assert_eq!(packed, present);
    }
}
