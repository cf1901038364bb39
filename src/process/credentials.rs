//! The user and groups of an agent that does not run as the user of the bridge.

use std::ffi::{CString, OsString};

use nix::unistd::{Gid, Group, Uid, User};
use serde::{Deserialize, Serialize};

/// A user as the configuration names it: by name or number.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Account {
    pub user: Option<String>,
    pub group: Option<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Credentials {
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) groups: Vec<u32>,
}

/// The result of a lookup in the databases of users and groups.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Resolved {
    /// `None` if the bridge has this user and group already.
    pub(super) credentials: Option<Credentials>,
    /// Whether the user is another one than that of the bridge.
    pub(super) is_other_user: bool,
    /// HOME, USER and LOGNAME of the user, if it is in the user database.
    pub(super) env: Vec<(OsString, OsString)>,
}

impl Account {
    /// Looks up the user and the group. This reads files or asks a directory service, so it may block.
    pub(super) fn resolve(&self) -> Result<Resolved, String> {
        if self.user.is_none() && self.group.is_none() {
            return Ok(Resolved::default());
        }
        let user = self.user.as_deref().map(find_user).transpose()?;
        let uid = user.as_ref().map_or_else(Uid::effective, |(uid, _)| *uid);
        let entry = user.and_then(|(_, entry)| entry);
        let gid = match (&self.group, &entry) {
            (Some(group), _) => find_group(group)?,
            (None, Some(entry)) => entry.gid,
            (None, None) => return Err(format!("user {uid} is not in the user database: set `group`, too")),
        };
        let mut groups = vec![gid.as_raw()];
        let mut env = Vec::new();
        if let Some(entry) = entry {
            let name = CString::new(entry.name.clone()).map_err(|error| error.to_string())?;
            if let Ok(found) = group_list(&name, gid) {
                groups = found;
            }
            env.push(("HOME".into(), entry.dir.into_os_string()));
            env.extend(["USER", "LOGNAME"].map(|variable| (variable.into(), entry.name.clone().into())));
        }
        let is_own = uid == Uid::effective() && gid == Gid::effective();
        let credentials = Credentials { uid: uid.as_raw(), gid: gid.as_raw(), groups };
        let is_other_user = uid != Uid::effective();
        Ok(Resolved { credentials: (!is_own).then_some(credentials), is_other_user, env })
    }
}

fn find_user(name: &str) -> Result<(Uid, Option<User>), String> {
    let unreadable = |error| format!("cannot look up user `{name}`: {error}");
    if let Some(user) = User::from_name(name).map_err(unreadable)? {
        return Ok((user.uid, Some(user)));
    }
    let number = name.parse().map_err(|_| format!("user `{name}` does not exist"))?;
    let uid = Uid::from_raw(number);
    Ok((uid, User::from_uid(uid).map_err(unreadable)?))
}

fn find_group(name: &str) -> Result<Gid, String> {
    let found = Group::from_name(name).map_err(|error| format!("cannot look up group `{name}`: {error}"))?;
    match found {
        Some(group) => Ok(group.gid),
        None => name.parse().map(Gid::from_raw).map_err(|_| format!("group `{name}` does not exist")),
    }
}

#[cfg(target_os = "linux")]
fn group_list(user: &std::ffi::CStr, gid: Gid) -> nix::Result<Vec<u32>> {
    Ok(nix::unistd::getgrouplist(user, gid)?.into_iter().map(Gid::as_raw).collect())
}

#[cfg(not(target_os = "linux"))]
fn group_list(_: &std::ffi::CStr, gid: Gid) -> nix::Result<Vec<u32>> {
    Ok(vec![gid.as_raw()])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn account(user: &str, group: &str) -> Account {
        let given = |text: &str| (!text.is_empty()).then(|| text.to_owned());
        Account { user: given(user), group: given(group) }
    }

    #[test]
    fn names_and_numbers_are_looked_up() {
        let root = account("root", "").resolve().unwrap();
        assert!(root.env.contains(&("USER".into(), "root".into())));
        assert_eq!(root.credentials.is_none(), Uid::effective().is_root());
        let other = account("54321", "54322").resolve().unwrap();
        assert_eq!(other.credentials, Some(Credentials { uid: 54321, gid: 54322, groups: vec![54322] }));
        assert!(other.is_other_user && other.env.is_empty());
        assert_eq!(account("", "").resolve().unwrap(), Resolved::default());
    }

    #[test]
    fn what_does_not_exist_is_named() {
        let message = |user, group| account(user, group).resolve().unwrap_err();
        assert_eq!(message("no-such-user", ""), "user `no-such-user` does not exist");
        assert_eq!(message("root", "no-such-group"), "group `no-such-group` does not exist");
        assert!(message("54321", "").contains("set `group`"));
    }
}
