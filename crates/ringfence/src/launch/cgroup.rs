//! Cgroup of a guest: the launcher makes it before the guest's domain, and tells init what to show of the hierarchies.

use ringfence_guest::CgroupConfig;
use ringfence_sandbox::cgroup::{CgroupError, GuestCgroup, Hierarchies, Limits};

use super::report::Reporter;

/// Cgroup of a guest, if it has one of its own, and the hierarchies of the launcher.
pub(super) struct OwnCgroup {
    hierarchies: Hierarchies,
    cgroup: Option<GuestCgroup>,
}

impl OwnCgroup {
    /// Creates the cgroup. Without limits the guest may go without one.
    pub(super) fn create(limits: &Limits, reporter: Reporter) -> Result<OwnCgroup, CgroupError> {
        let hierarchies = Hierarchies::read();
        let cgroup = GuestCgroup::create(&hierarchies, limits)?;
        match cgroup.as_ref().and_then(GuestCgroup::path) {
            Some(path) => reporter.step(format_args!("the guest's cgroup is {}", path.display())),
            None => reporter.step("the guest stays in the cgroup of its launcher"),
        }
        Ok(OwnCgroup { hierarchies, cgroup })
    }

    /// Returns the cgroup, if the guest has one of its own.
    pub(super) fn get(&self) -> Option<&GuestCgroup> {
        self.cgroup.as_ref()
    }

    /// Returns the configuration for init.
    pub(super) fn config(&self) -> CgroupConfig {
        let shown = self.hierarchies.iter().filter_map(|own| {
            let own_leaf = self.get().and_then(|cgroup| cgroup.leaf_in(own));
            let directory = own_leaf.unwrap_or_else(|| own.directory(&own.path));
            // The root of a hierarchy is shown as it is.
            (directory.strip_prefix(&own.point).is_ok_and(|below| below.components().count() > 0))
                .then(|| (own.point.clone(), directory))
        });
        let is_confined = self.get().is_some_and(GuestCgroup::is_unified)
            && self.hierarchies.iter().all(|own| own.is_unified);
        let shown = shown.collect();
        CgroupConfig { shown, namespaces: is_confined || !self.hierarchies.can_be_changed() }
    }
}
