//! Paths, and the components in which two of them differ.

use ringfence_access::Mode;

/// Path that packets take.
#[derive(Clone, Copy, PartialEq, Eq, Debug, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum PathName {
    Direct,
    RingWindow,
    RingStaging,
    RingCopy,
    Domain,
    Switch,
    Guest,
    Uplink,
    Policy,
}

impl PathName {
    pub(super) const ALL: [PathName; 9] = [
        PathName::Direct,
        PathName::RingWindow,
        PathName::RingStaging,
        PathName::RingCopy,
        PathName::Domain,
        PathName::Switch,
        PathName::Guest,
        PathName::Uplink,
        PathName::Policy,
    ];

    /// Returns the name in tables.
    pub(super) fn name(self) -> &'static str {
        match self {
            PathName::Direct => "source, sink",
            PathName::RingWindow => "ring, window",
            PathName::RingStaging => "ring, staged pages",
            PathName::RingCopy => "ring, grant copies",
            PathName::Domain => "ring between two domains",
            PathName::Switch => "two domains, switch",
            PathName::Guest => "three domains, switch",
            PathName::Uplink => "uplink",
            PathName::Policy => "uplink with a policy",
        }
    }

    pub(super) fn is_uplink(self) -> bool {
        matches!(self, PathName::Uplink | PathName::Policy)
    }

    /// Returns the access mode of a path that is a ring within one process.
    pub(super) fn ring(self) -> Option<Mode> {
        match self {
            PathName::RingWindow => Some(Mode::Window),
            PathName::RingStaging => Some(Mode::Staging),
            PathName::RingCopy => Some(Mode::Copy),
            _ => None,
        }
    }
}

/// Difference of two paths.
pub(super) struct Component {
    pub(super) name: &'static str,
    pub(super) with: PathName,
    pub(super) without: PathName,
    /// Cycles that other systems published for it: least and greatest.
    pub(super) published: Option<[u32; 2]>,
}

/// Cycles of one more domain, and of a copy of 1.5 KiB, in the tables of seL4's device driver framework.
pub(super) const PUBLISHED_DOMAIN: [u32; 2] = [350, 1500];
pub(super) const PUBLISHED_COPY: [u32; 2] = [700, 1000];

const fn component(name: &'static str, with: PathName, without: PathName) -> Component {
    Component { name, with, without, published: None }
}

/// Components, in the order of the table.
pub(super) static COMPONENTS: [Component; 8] = [
    component("ring crossing, window", PathName::RingWindow, PathName::Direct),
    component("ring crossing, staged pages", PathName::RingStaging, PathName::Direct),
    component("grant copy", PathName::RingCopy, PathName::RingStaging),
    component("domain boundary", PathName::Domain, PathName::RingStaging),
    component("switch", PathName::Switch, PathName::Domain),
    Component {
        published: Some(PUBLISHED_DOMAIN),
        ..component("one more distrusting domain", PathName::Guest, PathName::Switch)
    },
    component("uplink", PathName::Uplink, PathName::Direct),
    component("policy", PathName::Policy, PathName::Uplink),
];

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn components_have_names_that_differ_and_compare_different_paths() {
        let names: HashSet<&str> = COMPONENTS.iter().map(|component| component.name).collect();
        assert_eq!(names.len(), COMPONENTS.len());
        for component in &COMPONENTS {
            assert_ne!(component.with, component.without, "{}", component.name);
        }
        let paths: HashSet<&str> = PathName::ALL.iter().map(|path| path.name()).collect();
        assert_eq!(paths.len(), PathName::ALL.len());
    }
}
