//! Settings of the kernel that keep a user from making namespaces, and the commands that change them.

/// Setting of the kernel with a value that forbids namespaces.
struct Setting {
    /// Name, as sysctl(8) has it.
    name: &'static str,
    forbids: &'static str,
    permits: &'static str,
}

/// Settings by which `unshare` fails.
const SETTINGS: [Setting; 5] = [
    Setting { name: "kernel.unprivileged_userns_clone", forbids: "0", permits: "1" },
    Setting { name: "user.max_user_namespaces", forbids: "0", permits: "10000" },
    Setting { name: "user.max_pid_namespaces", forbids: "0", permits: "10000" },
    Setting { name: "user.max_mnt_namespaces", forbids: "0", permits: "10000" },
    Setting { name: "user.max_net_namespaces", forbids: "0", permits: "10000" },
];
/// Setting by which a user namespace can be made but gives no capability (Ubuntu).
const APPARMOR: Setting =
    Setting { name: "kernel.apparmor_restrict_unprivileged_userns", forbids: "1", permits: "0" };

impl Setting {
    /// Returns a sentence with the command that helps, if the setting forbids namespaces.
    fn remedy(&self, read: &impl Fn(&str) -> Option<String>) -> Option<String> {
        let Setting { name, forbids, permits } = self;
        (read(name)?.trim() == *forbids)
            .then(|| format!("{name} is {forbids}; as root: `sysctl -w {name}={permits}`"))
    }
}

/// Returns a sentence with the command that helps, if a setting keeps this process from making namespaces.
pub fn remedy() -> Option<String> {
    SETTINGS.iter().chain([&APPARMOR]).find_map(|setting| setting.remedy(&value))
}

/// Returns a sentence with the command that helps, if AppArmor takes the capabilities of user namespaces away. Processes
/// then fail when they use one.
pub fn remedy_for_capabilities() -> Option<String> {
    APPARMOR.remedy(&value).filter(|_| !rustix::process::geteuid().is_root())
}

/// Reads a kernel setting below `/proc/sys`; `None` if this kernel lacks it.
fn value(name: &str) -> Option<String> {
    std::fs::read_to_string(format!("/proc/sys/{}", name.replace('.', "/"))).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn setting_that_forbids_namespaces_has_a_command() {
        let [clone, max, ..] = &SETTINGS;
        let zero = |_: &str| Some("0\n".to_owned());
        let clone = clone.remedy(&zero).unwrap();
        assert!(clone.contains("`sysctl -w kernel.unprivileged_userns_clone=1`"), "{clone}");
        assert_eq!(max.remedy(&|_: &str| Some("127000\n".to_owned())), None);
        assert_eq!(max.remedy(&|_: &str| None), None, "a kernel without the setting");
        assert_eq!(APPARMOR.remedy(&zero), None);
        let restricted = APPARMOR.remedy(&|_: &str| Some("1\n".to_owned())).unwrap();
        assert!(restricted.ends_with("=0`"), "{restricted}");
    }
}
