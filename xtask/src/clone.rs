//! Clones of the repository, in which tests build.

use std::path::Path;

use taskkit::exec::Cmd;

/// Clones the last commit of the repository at `root` to `tree`, which does not exist. Its owner may be another user.
pub(crate) fn clone(root: &Path, tree: &Path) -> anyhow::Result<()> {
    let cloned = Cmd::new("git")
        .args(["clone".as_ref(), "--quiet".as_ref(), root.as_os_str(), tree.as_os_str()])
        .env("GIT_CONFIG_GLOBAL", root.join("xtask/gitconfig"))
        .run(root)?;
    anyhow::ensure!(cloned, "{} cannot be cloned", root.display());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repository_of_another_user_is_cloned() {
        let is_root = Cmd::new("sh").args(["-c", "test $(id -u) = 0"]).probe();
        if !is_root || !Cmd::new("git").args(["--version"]).probe() {
            println!("SKIPPED: only root can give a repository to another user, and it needs git");
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("root");
        std::fs::create_dir_all(root.join("xtask")).unwrap();
        let settings = Path::new(env!("CARGO_MANIFEST_DIR")).join("gitconfig");
        std::fs::copy(settings, root.join("xtask/gitconfig")).unwrap();
        let make = "git init -q && git add . && git -c user.name=a -c user.email=a@example commit -qm one && chown -R 1 .";
        assert!(Cmd::new("sh").args(["-ec", make]).run(&root).unwrap());
        let tree = folder.path().join("tree");
        clone(&root, &tree).unwrap();
        assert!(tree.join("xtask/gitconfig").is_file());
    }
}
